"""Table T: thirty bugs of real systems, planted in right programs."""
