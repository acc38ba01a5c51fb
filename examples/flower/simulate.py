"""Run the app as a simulation in this process and its environment: python simulate.py"""

import tomllib
from pathlib import Path

from digits.client_app import app as client_app
from digits.server_app import app as server_app
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server app with the configuration in pyproject.toml, which run_simulation does not read."""
    settings = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())
    context.run_config = settings["tool"]["flwr"]["app"]["config"]
    server_app(grid, context)


if __name__ == "__main__":
    run_simulation(app, client_app, num_supernodes=4, backend_config={"client_resources": {"num_cpus": 1}})
