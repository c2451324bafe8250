"""Trainers of other packages. Import each module by its own name; it needs the package it is named after."""
