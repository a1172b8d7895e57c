"""Measure `verify-external`: right programs in torch's own parallel styles, and mistakes planted in them."""
