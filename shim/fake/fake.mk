# The fake driver: daemon, libcuda, libnvidia-ml, nvidia-smi. Included by shim/Makefile; works alone as `make -f fake.mk fake`.
#   make fake BUILD=dir            -> dir/fake/...
#   make fake-install ROOT=dir     -> a driver root (install.sh)

BUILD ?= build
CC ?= gcc
FAKE := $(dir $(abspath $(lastword $(MAKEFILE_LIST))))
FAKE_OUT = $(BUILD)/fake
FAKE_VERSION := 580.65.06
FAKE_FLAGS = -std=c11 -O2 -Wall -Wextra -Wshadow -Wconversion -Werror $(SANITIZE) -fPIC -fvisibility=hidden -pthread \
	-I$(FAKE) -I$(FAKE)common -I$(FAKE)nvml $(FAKE_EXTRA)
FAKE_LINK = -shared -pthread -Wl,--hash-style=both -Wl,-Bsymbolic -Wl,-z,relro -Wl,-z,now -Wl,--no-undefined

FAKE_HEADERS := $(wildcard $(FAKE)*.h $(FAKE)*/*.h $(FAKE)*/*.def)
fake_objects = $(patsubst $(FAKE)%.c,$(FAKE_OUT)/obj/%.o,$(wildcard $(addprefix $(FAKE),$(1))))
FAKE_COMMON := common/branch.c common/fault.c common/page.c common/objects.c common/mig.c common/gpu_time.c common/channels.c common/client.c

.PHONY: fake fake-install
fake: $(FAKE_OUT)/nvidia-fake-driverd $(FAKE_OUT)/libcuda.so.$(FAKE_VERSION) $(FAKE_OUT)/libnvidia-ml.so.$(FAKE_VERSION) \
	$(FAKE_OUT)/nvidia-smi $(FAKE_OUT)/libfake-kernel.so

$(FAKE_OUT)/obj/%.o: $(FAKE)%.c $(FAKE_HEADERS) $(FAKE)fake.mk
	@mkdir -p $(@D)
	$(CC) $(FAKE_FLAGS) -c -o $@ $<

$(FAKE_OUT)/nvidia-fake-driverd: $(call fake_objects,daemon/*.c $(FAKE_COMMON))
	$(CC) $(SANITIZE) -pthread -o $@ $^

$(FAKE_OUT)/libcuda.so.$(FAKE_VERSION): $(call fake_objects,cuda/*.c common/hide.c $(FAKE_COMMON)) $(FAKE)cuda/libcuda.map
	$(CC) $(SANITIZE) $(FAKE_LINK) -Wl,-soname,libcuda.so.1 -Wl,--version-script=$(FAKE)cuda/libcuda.map -o $@.new $(filter %.o,$^) -ldl
	mv $@.new $@
	ln -sf $(@F) $(@D)/libcuda.so.1 && ln -sf libcuda.so.1 $(@D)/libcuda.so

$(FAKE_OUT)/libnvidia-ml.so.$(FAKE_VERSION): $(call fake_objects,nvml/*.c common/hide.c $(FAKE_COMMON)) $(FAKE)nvml/libnvidia-ml.map
	$(CC) $(SANITIZE) $(FAKE_LINK) -Wl,-soname,libnvidia-ml.so.1 -Wl,--version-script=$(FAKE)nvml/libnvidia-ml.map -o $@.new $(filter %.o,$^)
	mv $@.new $@
	ln -sf $(@F) $(@D)/libnvidia-ml.so.1 && ln -sf libnvidia-ml.so.1 $(@D)/libnvidia-ml.so

$(FAKE_OUT)/libfake-kernel.so: $(call fake_objects,kernel/*.c $(FAKE_COMMON)) $(FAKE)kernel/kernel.map
	$(CC) $(SANITIZE) $(FAKE_LINK) -Wl,-soname,libfake-kernel.so -Wl,--version-script=$(FAKE)kernel/kernel.map -o $@.new $(filter %.o,$^) -ldl
	mv $@.new $@

$(FAKE_OUT)/nvidia-smi: $(call fake_objects,smi/*.c) $(FAKE_OUT)/libnvidia-ml.so.$(FAKE_VERSION)
	$(CC) $(SANITIZE) -o $@ $(filter %.o,$^) -L$(FAKE_OUT) -l:libnvidia-ml.so.1 '-Wl,-rpath,$$ORIGIN:$$ORIGIN/../lib'

fake-install: fake
	$(FAKE)install.sh $(FAKE_OUT) $(ROOT)
