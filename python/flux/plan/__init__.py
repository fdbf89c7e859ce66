"""How a problem runs, and why. Plans are pure functions of facts that all ranks share."""
