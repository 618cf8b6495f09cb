"""The validator: claims submissions, checks them, cheapest checks first, and gives a verdict on each."""
