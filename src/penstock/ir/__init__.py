"""What a schedule is made of: actions, stages and their graph, placement, the integer table, messages."""
