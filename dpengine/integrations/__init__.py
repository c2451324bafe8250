"""Support for trainers of other packages. Each module requires the package that it is named after."""
