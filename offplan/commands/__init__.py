"""One module for each command of ``offplan``: read options, call one function, print."""
