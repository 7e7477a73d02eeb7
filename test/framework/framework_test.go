package framework

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// TestPoll checks that a wait ends with the condition's last error, not with that of the ended context.
func TestPoll(t *testing.T) {
	calls := 0
	err := poll(t.Context(), Patience, func(context.Context) error {
		if calls++; calls < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if err != nil || calls != 3 {
		t.Errorf("after %d calls: %v", calls, err)
	}
	err = poll(t.Context(), time.Millisecond, func(ctx context.Context) error {
		<-ctx.Done()
		return errors.New("it is pending")
	})
	if err == nil || err.Error() != "it is pending" {
		t.Errorf("got %v", err)
	}
}

// TestStartError checks that a cluster that can't start reports why.
func TestStartError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	check.Must(t, os.WriteFile(file, nil, 0o600))
	if c, err := Start(t.Context(), Options{Dir: file}); c != nil || err == nil {
		t.Errorf("got %v and %v, want an error", c, err)
	}
}

// TestMakeNode checks that the project reads the cards of a built node as they were described.
func TestMakeNode(t *testing.T) {
	node := MakeNode("n1").Unit(gpu.GiB).Cards(1, 16).Cards(1, 40).Unhealthy(1, "Xid 79").Obj()
	read := protocol.ParseNode(node)
	if read.Problem != nil || read.Unit != gpu.GiB || len(read.Cards) != 2 || read.Cards[1].Memory != 40 || read.Cards[0].Unhealthy != "" || read.Cards[1].Unhealthy != "Xid 79" {
		t.Errorf("the inventory is read as %+v", read)
	}
	if sum := node.Status.Allocatable[protocol.ResourceMemory]; sum.Value() != 56 || node.Labels[protocol.LabelShared] != "true" {
		t.Errorf("allocatable %v, labels %v", node.Status.Allocatable, node.Labels)
	}
}

// TestGPUMemOf compares the framework's own arithmetic with that of the project.
func TestGPUMemOf(t *testing.T) {
	got, want := map[string]int64{}, map[string]int64{}
	for _, pod := range []*corev1.Pod{
		MakePod("none").Obj(),
		MakePod("sum").GPUMem(3).Container("second", 4).Obj(),
		MakePod("init").GPUMem(3).InitContainer("init", 8).Obj(),
		MakePod("sidecar").GPUMem(3).InitContainer("first", 4).Sidecar("sidecar", 2).InitContainer("last", 7).Obj(),
	} {
		got[pod.Name], want[pod.Name] = GPUMemOf(pod), int64(protocol.PodRequest(pod))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-protocol +framework):\n%s", diff)
	}
}
