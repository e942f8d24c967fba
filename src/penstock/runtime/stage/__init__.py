"""One stage of a rank: its actions, the values between stages, and what it holds for its backwards."""
