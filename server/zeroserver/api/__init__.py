"""REST: routes, what they answer, and the queries behind them."""
