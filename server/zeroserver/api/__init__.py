"""REST API: routes, response resources, and the queries behind them."""
