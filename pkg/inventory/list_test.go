package inventory

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/fakenvml"
)

// mixedCards has one card of each kind; the broken cards are between the good ones.
var mixedCards = []fakenvml.Card{
	{UUID: "GPU-0", Model: "Tesla V100-SXM2-16GB", MiB: 16276, NUMANode: 0},
	{UUID: "GPU-1", Model: "Tesla V100-SXM2-16GB", MiB: 16276, NUMANode: 0, State: "lost"},
	{UUID: "GPU-2", Model: "NVIDIA A100-SXM4-40GB", MiB: 40960, NUMANode: 1, State: "mig"},
	{UUID: "GPU-3", Model: "NVIDIA H200", MiB: 143771, NUMANode: 70},
	{UUID: "GPU-4", Model: "Tesla T4", MiB: 15360, NUMANode: 1, State: "nomemory"},
	{UUID: "GPU-5", Model: "Tesla T4", MiB: 15360, NUMANode: 1, State: "denied"},
	{UUID: "GPU-6", Model: "Tesla T4", MiB: 15360, NUMANode: 1, State: "reset"},
	{UUID: "GPU-7", Model: "Tesla K80", MiB: 11441, NUMANode: -1, State: "noevents"},
	{UUID: "GPU-8", Model: "Tesla T4", MiB: 15360, State: "wantsreset"},
	{UUID: "GPU-9", Model: "GB10", State: "unified"},
	{UUID: "GPU-10", Model: "NVIDIA A100-SXM4-40GB", MiB: 40960, State: "mig", Options: []string{"memory=denied"}},
}

func TestList(t *testing.T) {
	onMachine(t, mixedCards, func(t *testing.T, library string, machine fakenvml.Machine) {
		list := func(what string, unit gpu.Unit, want State) {
			t.Helper()
			got, err := List(t.Context(), Options{Library: library, Settings: Settings{Unit: unit}})
			must(t, err)
			expect(t, what, want, got)
		}
		list("in MiB", gpu.MiB, State{Unit: gpu.MiB, Cards: []gpu.Card{
			{Index: 0, UUID: "GPU-0", Model: "Tesla V100-SXM2-16GB", Memory: 16276, NUMANode: 0},
			{Index: 1, NUMANode: gpu.NoNUMANode, Unhealthy: "opening the card: GPU is lost"},
			{Index: 2, UUID: "GPU-2", Model: "NVIDIA A100-SXM4-40GB", Memory: 40960, NUMANode: 1, Unhealthy: "MIG mode is on, its memory belongs to MIG devices"},
			{Index: 3, UUID: "GPU-3", Model: "NVIDIA H200", Memory: 143771, NUMANode: 70},
			{Index: 4, UUID: "GPU-4", Model: "Tesla T4", NUMANode: 1, Unhealthy: "reading its memory: Unknown Error"},
			{Index: 5, NUMANode: gpu.NoNUMANode, Unhealthy: "opening the card: Insufficient Permissions"},
			{Index: 6, UUID: "GPU-6", NUMANode: gpu.NoNUMANode, Unhealthy: "reading its memory: GPU requires reset"},
			{Index: 7, UUID: "GPU-7", Model: "Tesla K80", Memory: 11441, NUMANode: gpu.NoNUMANode},
			{Index: 8, UUID: "GPU-8", Model: "Tesla T4", Memory: 15360, Unhealthy: "the driver asks for a reset of the card"},
			{Index: 9, UUID: "GPU-9", Model: "GB10", Unhealthy: "the driver reports no memory of its own for it: set --card-memory"},
			{Index: 10, UUID: "GPU-10", Model: "NVIDIA A100-SXM4-40GB", Unhealthy: "MIG mode is on, its memory belongs to MIG devices"},
		}})
		// A second List opens a new session. Memory that doesn't fill a unit is not counted.
		setCards(t, machine, mixedCards[0])
		list("in GiB", gpu.GiB, State{Unit: gpu.GiB, Cards: []gpu.Card{{UUID: "GPU-0", Model: "Tesla V100-SXM2-16GB", Memory: 15}}})
		setCards(t, machine)
		list("without cards", gpu.GiB, State{Unit: gpu.GiB, Problem: "the driver reports no cards"})
	})
}

func TestListWithoutLibrary(t *testing.T) {
	for name, library := range map[string]string{
		"no such file":               "/nonexistent/libnvidia-ml.so.1",
		"a file that is no library":  "/dev/null",
		"a library that is not NVML": "libm.so.6",
	} {
		t.Run(name, func(t *testing.T) {
			state, err := List(t.Context(), Options{Library: library, Settings: Settings{Unit: gpu.GiB}})
			if !errors.Is(err, ErrNoLibrary) {
				t.Errorf("List() = %v, %v; want %v", state, err, ErrNoLibrary)
			}
			t.Log(err)
		})
	}
}

func TestListIncompleteLibrary(t *testing.T) {
	onMachine(t, mixedCards[:1], func(t *testing.T, library string, _ fakenvml.Machine) {
		_, err := List(t.Context(), Options{Library: library})
		if !errors.Is(err, ErrNoLibrary) || !strings.Contains(err.Error(), "nvmlEventSetWait") {
			t.Errorf("List() = %v, want %v", err, ErrNoLibrary)
		}
	}, "-DnvmlEventSetWait_v2=nvmlAnotherFunction")
}

func TestListWithBadDriver(t *testing.T) {
	onMachine(t, nil, func(t *testing.T, library string, machine fakenvml.Machine) {
		list := func() error {
			_, err := List(t.Context(), Options{Library: library, Settings: Settings{Unit: gpu.GiB}})
			return err
		}
		if err := list(); !errors.Is(err, nvml.ERROR_DRIVER_NOT_LOADED) {
			t.Errorf("without a driver: %v, want %v", err, nvml.ERROR_DRIVER_NOT_LOADED)
		}
		must(t, os.WriteFile(machine.CardsFile, []byte("nonsense\n"), 0o644))
		if err := list(); !errors.Is(err, nvml.ERROR_UNKNOWN) {
			t.Errorf("with a broken driver: %v, want %v", err, nvml.ERROR_UNKNOWN)
		}
	})
}

// A call into a driver that hangs can't be canceled, so each of the following tests has its own process.

func TestListCanceled(t *testing.T) {
	onMachine(t, with(mixedCards[:1], 0, "hang"), func(t *testing.T, library string, machine fakenvml.Machine) {
		t.Cleanup(func() { setCards(t, machine, mixedCards...) })
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := List(ctx, Options{Library: library}); !errors.Is(err, context.Canceled) {
			t.Errorf("List() = %v, want %v", err, context.Canceled)
		}
	})
}

func TestListTimeout(t *testing.T) {
	onMachine(t, with(mixedCards[:1], 0, "hang"), func(t *testing.T, library string, machine fakenvml.Machine) {
		t.Cleanup(func() { setCards(t, machine, mixedCards...) })
		_, err := List(t.Context(), Options{Library: library, AnswerTimeout: time.Millisecond})
		if want := "waiting for the NVIDIA driver: no answer for 1ms"; err == nil || err.Error() != want {
			t.Errorf("List() = %v, want %v", err, want)
		}
	})
}
