"""The process that a program runs in: its launcher, its settings, its end."""
