"""`shoal arena`: compares schemes that verify inference, on the same honest rows and the same lies."""
