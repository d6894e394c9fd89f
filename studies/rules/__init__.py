"""Two verification rules compared on the same prompts, by tokens a step and by speed."""
