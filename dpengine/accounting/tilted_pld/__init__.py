"""The privacy loss distribution accountant, with exponential tilting."""
