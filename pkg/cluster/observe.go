package cluster

import (
	"strconv"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpushare/gpushare/pkg/waiting"
)

// WatchVersions returns the resource version that each watch has reached, by resource. A watch that has reached none is
// left out. While a watch works, its version grows with every change and with the API server's bookmarks.
func (c *Cluster) WatchVersions() map[string]uint64 {
	versions := make(map[string]uint64, len(c.watches))
	for resource, informer := range c.watches {
		if version, err := strconv.ParseUint(informer.LastSyncResourceVersion(), 10, 64); err == nil && version > 0 {
			versions[resource] = version
		}
	}
	return versions
}

// NodesWithoutPlugin returns the number of nodes with GPU memory whose device plugin is not connected to the kubelet.
func (c *Cluster) NodesWithoutPlugin() int {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return 0 // A lister reads memory and does not fail.
	}
	count := 0
	for _, node := range nodes {
		if waiting.Disconnected(node) {
			count++
		}
	}
	return count
}
