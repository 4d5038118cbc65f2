"""Take the local steps of many clients at once, as steps of one stack of models."""
