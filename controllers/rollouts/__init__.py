"""The replicas that draw responses, and experience made of what they drew."""
