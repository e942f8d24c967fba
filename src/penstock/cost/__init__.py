"""What things cost: seconds and bytes of every action, message and stage."""
