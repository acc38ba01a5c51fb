"""`python -m gradwire.cli` does what `gradwire` does: the form that torchrun's `-m` takes."""

from gradwire.cli import main

main()
