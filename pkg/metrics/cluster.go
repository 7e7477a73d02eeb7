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

// Cluster collects the state of a cluster at each scrape.
type Cluster struct {
	state             ClusterState
	versions, without *prometheus.Desc
}

// NewCluster registers the collector.
func NewCluster(registry prometheus.Registerer, state ClusterState) {
	registry.MustRegister(&Cluster{
		state: state,
		versions: prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "watch_resource_version"),
			"Last resource version that the watch of a resource has received from the API server. It stops increasing if the watch is stale.", []string{"resource"}, nil),
		without: prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "nodes_without_plugin"),
			"Number of nodes that share cards and whose kubelet has no device plugin for them.", nil, nil),
	})
}

// Describe implements prometheus.Collector.
func (c *Cluster) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.versions
	ch <- c.without
}

// Collect implements prometheus.Collector.
func (c *Cluster) Collect(ch chan<- prometheus.Metric) {
	for resource, version := range c.state.WatchVersions() {
		ch <- prometheus.MustNewConstMetric(c.versions, prometheus.GaugeValue, float64(version), resource)
	}
	if c.state.Ready() == nil {
		ch <- prometheus.MustNewConstMetric(c.without, prometheus.GaugeValue, float64(c.state.NodesWithoutPlugin()))
	}
}
