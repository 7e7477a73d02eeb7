package inventory

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/fakenvml"
)

// visit runs a monitor until its first visit with this many readable cards, and calls f during that visit.
func visit(t *testing.T, library string, cards int, f func(*Session)) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	visited := false
	monitor := New(Options{Library: library, Settings: Settings{Unit: gpu.MiB}, ProbeInterval: time.Millisecond, VisitInterval: time.Millisecond, Visit: func(s *Session) {
		if !visited && len(s.Cards()) == cards {
			visited = true
			f(s)
			stop()
		}
	}})
	must(t, monitor.Run(ctx, func(State) {}))
	if !visited {
		t.Fatalf("no visit with %d cards", cards)
	}
}

func TestSession(t *testing.T) {
	cards := []fakenvml.Card{
		{UUID: "GPU-a", MiB: 1000, Options: []string{"reserved=100"}}, {UUID: "GPU-mig", MiB: 1000, State: "mig"}, {UUID: "GPU-lost", MiB: 1000, State: "lost"},
		{UUID: "GPU-wants", MiB: 1000, State: "wantsreset"}, {UUID: "GPU-denied", MiB: 1000, Options: []string{"processes=denied", "limits=failing"}},
		{UUID: "GPU-none", MiB: 1000, Options: []string{"processes=unsupported", "limits=unsupported"}},
	}
	onMachine(t, cards, func(t *testing.T, library string, machine fakenvml.Machine) {
		if err := machine.SetProcesses(
			fakenvml.Process{Card: "GPU-a", PID: 7, MiB: 30}, fakenvml.Process{Card: "GPU-a", PID: 8, MiB: -1},
			fakenvml.Process{Card: "GPU-a", PID: 9, MiB: 5, Graphics: true},
			fakenvml.Process{Card: "GPU-a", PID: 7, MiB: 32, Graphics: true}, fakenvml.Process{Card: "GPU-a", PID: 8, MiB: 2, Graphics: true},
			fakenvml.Process{Card: "GPU-wants", PID: 7, MiB: 1}, fakenvml.Process{Card: "GPU-wants", PID: 8, MiB: 2, MPS: true},
		); err != nil {
			t.Fatal(err)
		}
		cgroup := t.TempDir() // The fake library takes any folder that isn't one of cgroup v1.
		visit(t, library, 4, func(s *Session) {
			expect(t, "cards", []string{"GPU-a", "GPU-wants", "GPU-denied", "GPU-none"}, s.Cards())
			processes, err := s.Processes("GPU-a")
			expect(t, "a process that computes and draws is one", []Process{{7, 32 << 20}, {8, 2 << 20}, {9, 5 << 20}}, processes)
			expect(t, "error", nil, err)
			used, free, err := s.Memory("GPU-a")
			expect(t, "what the driver reserves isn't in use", uint64(30+2+5+32)<<20, used)
			expect(t, "nor is it free", uint64(1000-100)<<20, used+free)
			expect(t, "error", nil, err)
			processes, err = s.Processes("GPU-wants")
			expect(t, "a client of MPS", []Process{{7, 1 << 20}, {8, 2 << 20}}, processes)
			expect(t, "error", nil, err)
			_, err = s.Processes("GPU-denied")
			expect(t, "no permission", true, errors.Is(err, nvml.ERROR_NO_PERMISSION))
			processes, err = s.Processes("GPU-none")
			expect(t, "a card that lists none", 0, len(processes))
			expect(t, "error", nil, err)
			_, err = s.Processes("GPU-lost")
			expect(t, "a lost card", true, errors.Is(err, errNoSuchCard))

			compute, err := s.Compute("GPU-a")
			expect(t, "compute", Compute{Major: 7, Mode: ComputeDefault}, compute)
			expect(t, "error", nil, err)
			_, err = s.Compute("GPU-mig")
			expect(t, "a card in MIG mode", true, errors.Is(err, errNoSuchCard))

			expect(t, "limits", true, s.Limits())
			limit, err := s.Limit("GPU-a", cgroup)
			expect(t, "no limit was set", MemoryLimit{Hard: NoLimit}, limit)
			expect(t, "error", nil, err)
			handle, err := s.card("GPU-a")
			expect(t, "error", nil, err)
			expect(t, "setting a limit", nvml.SUCCESS, handle.SetMemoryLimits_v1(cgroup, 0, 64<<20))
			limit, err = s.Limit("GPU-a", cgroup)
			expect(t, "the limit", uint64(64<<20), limit.Hard)
			expect(t, "error", nil, err)
			_, err = s.Limit("GPU-none", cgroup)
			expect(t, "an unsupported card", true, errors.Is(err, ErrUnsupported))
			_, err = s.Limit("GPU-denied", cgroup)
			expect(t, "a failing card", true, errors.Is(err, nvml.ERROR_UNKNOWN))
			_, err = s.Limit("GPU-a", cgroup+"/nowhere")
			expect(t, "no such cgroup", true, errors.Is(err, nvml.ERROR_OPERATING_SYSTEM))
		})
	})
}

func TestSessionOldDriver(t *testing.T) {
	onMachine(t, []fakenvml.Card{{UUID: "GPU-a", MiB: 1000}}, func(t *testing.T, library string, _ fakenvml.Machine) {
		visit(t, library, 1, func(s *Session) {
			expect(t, "limits", false, s.Limits())
			_, err := s.Limit("GPU-a", "/")
			expect(t, "a limit", true, errors.Is(err, ErrUnsupported))
			_, _, err = s.Memory("GPU-a")
			expect(t, "the card's memory", nil, err)
		})
	}, fakenvml.BeforeR615, "-DnvmlDeviceGetMemoryInfo_v2=nvmlAnotherFunction")
}
