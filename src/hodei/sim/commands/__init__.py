"""`hodei sim replay|compare|capacity|forecasts`, one module per command. `simulate` builds and runs a simulation; `output` has the
progress display and the output files.
"""
