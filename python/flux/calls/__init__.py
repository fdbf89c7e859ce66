"""What all operators' calls have in common: schemas, checks, and the way into torch's dispatcher."""
