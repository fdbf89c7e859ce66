"""Process groups, and the memory that their ranks share."""
