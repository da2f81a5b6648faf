"""When things go wrong: watchdog, report, flight recorder, mismatch check."""
