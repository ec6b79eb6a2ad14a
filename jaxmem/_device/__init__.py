"""What a step is planned for: devices, their rates, and what they can do. Imports `_core`."""
