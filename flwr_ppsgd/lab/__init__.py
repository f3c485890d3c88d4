"""The laboratory: everything that holds everybody's data on one machine.

The plugin never imports it; ``cli`` does when a command asks for it.
"""
