# Everything a person or a machine runs here. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
NEXTEST := $(shell $(CARGO) nextest --version >/dev/null 2>&1 && echo yes)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: setup
setup: ## install what Debian provides and the build, lab or tests need (asks nothing)
	@tools/setup.sh base

.PHONY: setup-verbs
setup-verbs: setup ## install what the SoftRoCE lab needs; without it, its tests are skipped and say so
	@tools/setup.sh verbs || echo "setup-verbs: not all could be installed; tests that need it are skipped"

.PHONY: setup-cluster
setup-cluster: setup ## install what tests of the coordinator need: an etcd and a browser; without them, those are skipped and say so
	@tools/setup.sh cluster || echo "setup-cluster: not all could be installed; tests that need it are skipped"

.PHONY: setup-python
setup-python: setup ## make the environment in which the Python package is built; without it, its tests are skipped and say so
	@{ tools/setup.sh python && mooncake-adapter/setup.sh "$(abspath $(TARGET))/python"; } || echo "setup-python: not all could be installed; tests that need it are skipped"

.PHONY: setup-packages
setup-packages: setup ## install what packages and packages-check need
	@tools/setup.sh packages || echo "setup-packages: not all could be installed; tests that need it are skipped"

.PHONY: setup-kubernetes
setup-kubernetes: setup ## install what renders and checks the Helm chart; without it, its test is skipped and says so
	@{ tools/setup.sh kubernetes && tests/kubernetes/setup.sh "$(abspath $(TARGET))/kubernetes"; } || echo "setup-kubernetes: not all could be installed; tests that need it are skipped"

.PHONY: setup-vllm
setup-vllm: setup-python ## vLLM for processors in an environment of its own: 6 GB in target/vllm, 3 to 10 minutes
	@mooncake-adapter/setup-vllm.sh "$(abspath $(TARGET))/vllm"

.PHONY: wheel
wheel: setup-python ## the Python package with all libraries inside, in target/wheels: pip install target/wheels/laxity-*.whl
	mooncake-adapter/wheel.sh

# What operators run. The laboratory is apart.
PRODUCT := -p laxity-daemon -p laxity-coordinator -p laxity-cli -p laxity-client-c -p laxity-verbs -p laxity-mooncake -p laxity-nccl -p laxity-nixl

# No folder of this machine is in a release, so that every folder gives the same bytes.
core lab release bench faults: export RUSTC_WRAPPER ?= $(CURDIR)/tools/remap-paths.sh
core lab release bench faults: export CFLAGS += -ffile-prefix-map=$(CURDIR)=/usr/src/laxity \
	-ffile-prefix-map=$(or $(CARGO_HOME),$(HOME)/.cargo)=/usr/src/cargo

.PHONY: core
core: setup ## the product's programs and libraries, in target/release
	$(CARGO) build --release --locked $(PRODUCT)
	@ln -sf libnccl_net_laxity.so $(TARGET)/release/libnccl-net-laxity.so

.PHONY: lab
lab: core ## laxity-lab as well: hosts on one machine, simulated clusters; an engine without a tensor library
	$(CARGO) build --release --locked --no-default-features --features laxity-lab/clusters -p laxity-lab -p laxity-engine

.PHONY: release
release: lab ## everything that can be installed; the engine's tensor library takes as long as the rest
	$(CARGO) build --release --locked -p laxity-engine

.PHONY: engine-cuda
engine-cuda: setup ## laxity-engine for GPUs, in target/cuda, with CUDA from PyPI's wheels (1.2 GB); needs no GPU
	CARGO="$(CARGO)" tools/engine/build-cuda.sh

# Faster to build than the release, and as fast where it counts.
.PHONY: demo
demo: ## the lab with ports of 100 Mbit/s: four policies on the same arrivals, a table and a page
	@echo "demo 1/3: installing what the build needs"
	@tools/setup.sh base
	@echo "demo 2/3: building laxityd, laxity-engine and laxity-lab (most of the time, the first time)"
	$(CARGO) build --profile demo --locked --no-default-features -p laxity-daemon -p laxity-engine -p laxity-lab
	@echo "demo 3/3: playing the same requests under each policy"
	$(TARGET)/demo/laxity-lab lab run --port-mbit 100 --html lab-report.html --json lab-report.json

.PHONY: demo-engine
demo-engine: release ## the same with the real engine, which computes a small model: a table and a page
	$(TARGET)/release/laxity lab run --engine real --html lab-engine.html --json lab-engine.json

.PHONY: demo-vllm
demo-vllm: setup-vllm lab wheel ## the same with vLLM, prefill and decode apart: a table and a page
	@"$(abspath $(TARGET))/vllm/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
		--force-reinstall $(TARGET)/wheels/laxity-*.whl
	LAXITY_VLLM_PYTHON="$(abspath $(TARGET))/vllm/bin/python" $(TARGET)/release/laxity lab run --engine vllm \
		--html lab-vllm.html --json lab-vllm.json

REPRODUCTION_OUT ?= target/reproduction

.PHONY: reproduction
reproduction: lab ## simulate all plans that docs/reproduction-tables.md shows and fill in its tables; continues an interrupted run
	@plans="$$($(TARGET)/release/laxity sim findings --plans)"; \
	for plan in $$plans; do \
		$(TARGET)/release/laxity sim run "$$plan" --out "$(REPRODUCTION_OUT)/$$plan" >/dev/null; \
	done
	$(TARGET)/release/laxity sim findings --results "$(REPRODUCTION_OUT)"

# The crates with examples in their documentation. For all crates rustdoc takes minutes.
WITH_EXAMPLES := laxity-client laxity-nccl-host laxity-shm

# Tests that can't run here add a line each (tests/src/lib.rs).
SKIPPED := $(abspath $(TARGET))/skipped-tests.txt

# One build with the features of all: programs, libraries and tests apart would each build everything anew.
.PHONY: test-build
test-build: setup
	$(CARGO) build --locked --workspace --lib --bins --tests

# In sequence, because apt takes a lock.
.PHONY: test-tools
test-tools: setup
	@for tools in verbs cluster python kubernetes; do $(MAKE) --no-print-directory setup-$$tools; done

# Downloads need no processor, so they run beside the build. Tests wait for about half of their time, so nextest runs
# two per processor.
.PHONY: test
test: export LAXITY_SKIPPED := $(SKIPPED)
test: setup ## every test: units, properties, loom models, whole processes, real labs
	@mkdir -p "$(TARGET)" && : >"$(SKIPPED)"
	@echo "test: installing tools beside the build, see $(TARGET)/test-tools.log"
	@$(MAKE) --no-print-directory test-tools >"$(TARGET)/test-tools.log" 2>&1 & tools=$$!; \
	$(MAKE) --no-print-directory test-build || { kill $$tools; exit 1; }; \
	wait $$tools; grep "not all could be installed" "$(TARGET)/test-tools.log" || true
ifeq ($(NEXTEST),yes)
	$(CARGO) nextest run --locked --workspace --no-fail-fast --test-threads $$(( 2 * $$(nproc) ))
else
	$(CARGO) test --locked --workspace --no-fail-fast
endif
	$(CARGO) test --locked --doc $(addprefix -p ,$(WITH_EXAMPLES))
	RUSTFLAGS="--cfg loom" CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 $(CARGO) test --locked --release --target-dir $(TARGET)/loom -p laxity-shm --test 'loom*'
	@if [ -s "$(SKIPPED)" ]; then \
		echo "test: passed, but these can't run here (LAXITY_REQUIRE=all makes them fail):"; \
		sort -u "$(SKIPPED)" | sed 's/^/  /'; \
	else \
		echo "test: passed, and nothing was skipped"; \
	fi

.PHONY: bench
bench: release ## tables: hot path, policy cost and idle cost beside the machine's own cache-line round trip; decisions of request schedulers
	@tools/setup.sh bench
	$(CARGO) bench --locked -p laxity-policy
	$(CARGO) bench --locked -p laxity-requests
	$(CARGO) run --release --locked -p laxity-bench --
	@for row in producers-1 permits-closed; do tools/bench/daemon-instructions.sh $$row $(TARGET)/release; done
	tests/verbs/cost/run.sh $(TARGET)/release
	tests/nccl/bench.py $(TARGET)/release

.PHONY: check
check: setup ## fmt, clippy, deny
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@if $(CARGO) deny --version >/dev/null 2>&1; then \
		$(CARGO) deny --locked check bans licenses sources; \
		said="$$(mktemp)"; trap 'rm -f "$$said"' EXIT; \
		$(CARGO) deny --locked check advisories 2>"$$said" \
			|| { ! grep -q 'error\[' "$$said" && grep -qiE 'failed to (fetch|clone)|could not connect|resolve|network|index' "$$said" \
				&& echo "deny: the advisory database can't be reached from here; the other checks ran" \
				|| { cat "$$said"; exit 1; }; }; \
	else \
		echo "deny: cargo-deny is not installed here (cargo install --locked cargo-deny); skipped"; \
	fi

.PHONY: fuzz
fuzz: setup ## arbitrary bytes for everything that reads input, each target for FUZZ_SECONDS (60)
	CARGO="$(CARGO)" tools/fuzz/run.sh

.PHONY: verbs
verbs: lab setup-verbs ## unmodified RDMA programs under the scheduler, in the SoftRoCE lab: a table and JSON
	$(TARGET)/release/laxity lab verbs --keep-going --json lab-verbs.json

FAULTS ?= 100000
SEED ?= 1

.PHONY: faults
faults: lab ## FAULTS (100000) faults, drawn from SEED (1), against a real daemon and its clients; continues an interrupted run
	@mkdir -p "$(TARGET)/faults"
	$(CARGO) build --release --locked -p laxity-python
	@$(TARGET)/release/laxity lab faults --prepare || echo "faults: goes on without what it could not get"
	$(TARGET)/release/laxity lab faults --faults $(FAULTS) --seed $(SEED) --failures "$(TARGET)/faults" \
		--state "$(TARGET)/faults/all-$(SEED).json" --json "$(TARGET)/faults/report-$(SEED).json" \
		--report "$(TARGET)/faults/report-$(SEED).md"

.PHONY: sanitize
sanitize: test-build ## the tests' C programs with AddressSanitizer and UBSan, and the libraries in them under valgrind
	@command -v valgrind >/dev/null || tools/setup.sh bench
	tools/sanitize.sh "$(TARGET)/debug"

HOURS ?= 4

.PHONY: soak
soak: lab ## one daemon and its clients at full load for HOURS (4): memory, descriptors and counters
	@mkdir -p "$(TARGET)/faults"
	$(CARGO) build --release --locked -p laxity-python
	@$(TARGET)/release/laxity lab faults --prepare || echo "soak: goes on without what it could not get"
	$(TARGET)/release/laxity lab faults --soak $(HOURS)h --seed $(SEED) --json "$(TARGET)/faults/soak-$(SEED).json"

MDBOOK := $(or $(shell command -v mdbook),$(TARGET)/tools/bin/mdbook)

.PHONY: docs
docs: ## the documentation as a book, in target/book (builds mdbook where there is none, once, 2 to 4 minutes)
	@command -v "$(MDBOOK)" >/dev/null || CARGO_PROFILE_RELEASE_OPT_LEVEL=1 $(CARGO) install --locked mdbook \
		--version 0.4.52 --no-default-features --features search --root "$(TARGET)/tools" --target-dir "$(TARGET)/tools/build"
	$(MDBOOK) build --dest-dir "$(abspath $(TARGET))/book"
	@echo "the book: $(TARGET)/book/index.html"

.PHONY: packages
packages: release setup-packages ## Debian packages and RPMs of the programs, with debug symbols apart, in target/packages
	TARGET="$(TARGET)" tools/packages.sh

# What is tried on which distribution. `deb/noble` works, too, where Debian's tools have the keyring of Ubuntu.
CASES ?= deb/bookworm deb/trixie deb/testing rpm/bookworm

.PHONY: reproducible-check
reproducible-check: core ## build the product again from a clone in another folder, and check that all bytes are the same
	tests/packages/rebuild.sh $(TARGET)/release

.PHONY: packages-check
packages-check: packages ## install, upgrade under load, remove and purge them in booted containers: Debian 12, 13 and testing; RPMs
	TARGET="$(TARGET)" tests/packages/reproduce.sh $(TARGET)/packages
	TARGET="$(TARGET)" tests/packages/check.sh $(TARGET)/packages $(CASES)

# Before the first release, the commit before this one is what there is to upgrade from.
SINCE ?= $(shell git describe --tags --abbrev=0 2>/dev/null || git rev-parse HEAD~1)

.PHONY: packages-upgrade-check
packages-upgrade-check: packages ## the same on Debian 12, from packages of the last release (SINCE=COMMIT), which it builds
	tests/packages/before.sh "$(SINCE)" $(TARGET)/before
	OLD="$(abspath $(TARGET))/before/packages" tests/packages/check.sh $(TARGET)/packages deb/bookworm rpm/bookworm

.PHONY: wheel-check
wheel-check: wheel packages ## install the wheel without a compiler or a network, and use it with the daemon of the packages
	tests/packages/check.sh $(TARGET)/packages wheel/bookworm

.PHONY: upgrade-check
upgrade-check: test-build ## this build and that of the last release (SINCE=COMMIT) work together, and hosts upgrade under load
	TARGET="$(abspath $(TARGET))" tests/upgrade.sh "$(SINCE)"

.PHONY: image
image: packages setup-kubernetes ## a container image of the packages, without a registry: target/packages/laxity-image.tar
	@tools/setup.sh image
	TARGET="$(TARGET)" tools/image.sh

.PHONY: image-check
image-check: image ## run the chart's DaemonSet from that image with runc, and attach a client
	$(TARGET)/kubernetes/bin/python tests/kubernetes/run.py $(TARGET)/packages/laxity-image.tar

.PHONY: kubernetes
kubernetes: setup-kubernetes ## render the Helm chart into dist/kubernetes/base and full
	$(TARGET)/kubernetes/bin/python tests/kubernetes/render.py dist/kubernetes

.PHONY: install
install: core ## install the daemon, the coordinator, the CLI, the libraries, units, man pages and completions
	DESTDIR="$(DESTDIR)" TARGET="$(TARGET)" tools/install.sh

.PHONY: install-lab
install-lab: release ## install laxity-lab and laxity-engine beside them
	DESTDIR="$(DESTDIR)" TARGET="$(TARGET)" tools/install.sh install-lab

.PHONY: uninstall
uninstall: ## remove what both installed; edited configuration and the daemon's user stay
	DESTDIR="$(DESTDIR)" tools/install.sh remove
