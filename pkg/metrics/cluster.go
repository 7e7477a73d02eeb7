package metrics

import "github.com/prometheus/client_golang/prometheus"

// ClusterState is what is reported of the API server's objects.
type ClusterState interface {
	// Ready returns why nothing can be reported yet, or nil.
	Ready() error
	// WatchVersions returns the resource version that each watch has reached, by resource.
	WatchVersions() map[string]uint64
	// NodesWithoutPlugin counts the nodes that share cards and have no device plugin.
	NodesWithoutPlugin() int
}

// Cluster collects the state of a cluster, at each scrape.
type Cluster struct {
	state             ClusterState
	versions, without *prometheus.Desc
}

// NewCluster registers the collector.
func NewCluster(registry prometheus.Registerer, state ClusterState) {
	registry.MustRegister(&Cluster{
		state: state,
		versions: prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "watch_resource_version"),
			"Resource version that a watch of the API server has reached. It stays the same where the watch is stale.", []string{"resource"}, nil),
		without: prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "nodes_without_plugin"),
			"Nodes that share their cards, and whose kubelet has no device plugin for them.", nil, nil),
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
