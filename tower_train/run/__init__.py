"""What happens around the steps."""
