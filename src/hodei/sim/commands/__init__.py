"""THE TERMINAL OF THE SIMULATOR: `hodei sim replay|compare|forecasts|policies|traces`, a module for each.

`running` turns an order into a result, `progress` shows how far it is, `outputs` writes files whole or not at all.
"""
