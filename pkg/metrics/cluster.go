package metrics

import "github.com/prometheus/client_golang/prometheus"

// ClusterState provides the state of the caches of nodes and pods.
type ClusterState interface {
	// WatchVersions returns the last resource version of each watch, by resource.
	WatchVersions() map[string]uint64
}

// NewCluster registers a collector that reads the state at each scrape.
func NewCluster(registry prometheus.Registerer, state ClusterState) {
	versions := gaugeDesc("watch_resource_version",
		"Last resource version that the watch of a resource has received from the API server. It stops increasing if the watch is stale.", "resource")
	registry.MustRegister(&gauges{[]*prometheus.Desc{versions}, func(set setGauge) {
		for resource, version := range state.WatchVersions() {
			set(versions, float64(version), resource)
		}
	}})
}
