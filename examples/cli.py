"""The same job through LightningCLI.

``python examples/cli.py fit --config examples/config.yaml`` (or ``config_class_path.yaml``).
Nothing here imports ZenFlow: the configuration names it.
"""

from __future__ import annotations

from gpt import GPTModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from text import TextData


class GPTCLI(LightningCLI):
    """LightningCLI that sets the model's and the data's block size together."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.block_size", "data.block_size")


def main() -> None:
    """Run the subcommand given on the command line, e.g. ``fit``."""
    GPTCLI(GPTModule, TextData, seed_everything_default=0)


if __name__ == "__main__":
    main()
