package cluster

import (
	"testing"

	"github.com/gpushare/gpushare/pkg/protocol"
)

func TestWatchVersions(t *testing.T) {
	node := newNode(t, "n1", 100)
	node.ResourceVersion = "41"
	f := start(t, patient, node)
	if got := f.WatchVersions()["nodes"]; got > 41 {
		t.Errorf("the watch of nodes has reached %d before any change", got)
	}
	node = node.DeepCopy()
	node.ResourceVersion = "57"
	f.publishNode(node)
	f.await("the watch to tell of the change", func() bool { return f.WatchVersions()["nodes"] == 57 })
}

func TestNodesWithoutPlugin(t *testing.T) {
	node := newNode(t, "n1", 100)
	node.Status.Allocatable = node.Status.Capacity.DeepCopy()
	f := start(t, patient, node, newNode(t, "n2", 100))
	if got := f.NodesWithoutPlugin(); got != 0 {
		t.Errorf("%d nodes have lost their plugin, want none", got)
	}
	node = node.DeepCopy()
	node.Status.Allocatable = amount(protocol.ResourceMemory, 0) // The kubelet reports this once a plugin is gone.
	f.publishNode(node)
	f.await("the node to lose its plugin", func() bool { return f.NodesWithoutPlugin() == 1 })
}
