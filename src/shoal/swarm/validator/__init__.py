"""The validator: claims submissions, checks them from cheap to dear, gives one verdict each. Imports nothing."""
