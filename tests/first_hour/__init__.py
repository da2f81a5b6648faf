"""What five people write in their first hour."""
