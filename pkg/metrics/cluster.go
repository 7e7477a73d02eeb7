package metrics

import "github.com/prometheus/client_golang/prometheus"

// ClusterState provides the state of the caches of nodes and pods.
type ClusterState interface {
	// Ready returns an error until the caches are synced.
	Ready() error
	// WatchVersions returns the last resource version of each watch, by resource.
	WatchVersions() map[string]uint64
	// NodesWithoutPlugin returns the number of nodes that share cards and have no device plugin.
	NodesWithoutPlugin() int
}

// NewCluster registers a collector that reads the state at each scrape.
func NewCluster(registry prometheus.Registerer, state ClusterState) {
	versions := gaugeDesc("watch_resource_version",
		"Last resource version that the watch of a resource has received from the API server. It stops increasing if the watch is stale.", "resource")
	without := gaugeDesc("nodes_without_plugin", "Number of nodes that share cards and whose kubelet has no device plugin for them.")
	registry.MustRegister(&gauges{[]*prometheus.Desc{versions, without}, func(set setGauge) {
		for resource, version := range state.WatchVersions() {
			set(versions, float64(version), resource)
		}
		if state.Ready() == nil {
			set(without, float64(state.NodesWithoutPlugin()))
		}
	}})
}
