package schedulerconfig

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"
	schedulerv1 "k8s.io/kube-scheduler/config/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Severity is the severity of a finding.
type Severity string

// The severities.
const (
	// Error: kube-scheduler rejects the configuration, pods aren't scheduled, or pods are bound without a card.
	Error Severity = "error"
	// Warning: gpushare works, but not as well or as safely as it could.
	Warning Severity = "warning"
)

// Finding is a wrong or missing setting.
type Finding struct {
	Severity Severity
	// Path is the field, such as "extenders[0].httpTimeout".
	Path string
	// Text describes the problem and its solution.
	Text string
}

func (f Finding) String() string { return fmt.Sprintf("%s: %s: %s", f.Severity, f.Path, f.Text) }

// Options are the settings of the extender that the configuration must match.
type Options struct {
	// Path is the URL path of the extender's verbs, such as "/gpushare-scheduler".
	Path string
	// PagePort is the port of the extender's web page, which serves none of the verbs.
	PagePort string
	// BindTimeout and GangHold are the extender's --bind-timeout and --gang-hold.
	BindTimeout, GangHold time.Duration
	// NodesToScore is the extender's --percentage-of-nodes-to-score.
	NodesToScore int
	// ClientNames are the extender's --client-names; none if it takes any certificate.
	ClientNames []string
	// Now is the time at which certificates must be valid.
	Now time.Time
	// ReadFile reads a certificate that the configuration names, like os.ReadFile. One that can't be read isn't checked: kube-scheduler may run
	// elsewhere.
	ReadFile func(path string) ([]byte, error)
	// Proxy returns the proxy that the environment names for a request, or nil, like http.ProxyFromEnvironment; kubeadm gives kube-scheduler
	// the proxies of its own environment. If Proxy is nil, proxies aren't checked.
	Proxy func(*http.Request) (*url.URL, error)
}

const (
	// defaultHTTPTimeout is kube-scheduler's default (k8s.io/kubernetes pkg/scheduler/extender.go, DefaultExtenderTimeout).
	defaultHTTPTimeout = 5 * time.Second
	// defaultMaxBackoff is kube-scheduler's default in seconds (k8s.io/kubernetes pkg/scheduler/apis/config/v1/defaults.go).
	defaultMaxBackoff int64 = 10
	// pluginScores is about the sum of kube-scheduler's own scores, scoreOfWeight the best of an extender with weight 1.
	pluginScores, scoreOfWeight = 1200, 100
)

// Check returns the findings in a configuration, or nil if there are none. It checks only what concerns gpushare: kube-scheduler checks the whole
// file when it starts.
func Check(config *schedulerv1.KubeSchedulerConfiguration, o Options) []Finding {
	c := &check{Options: o, config: config}
	c.nodesToScore()
	c.backoff()
	c.extenders()
	return c.findings
}

type check struct {
	Options
	config   *schedulerv1.KubeSchedulerConfiguration
	findings []Finding
}

func (c *check) add(severity Severity, path *field.Path, format string, args ...any) {
	c.findings = append(c.findings, Finding{severity, path.String(), fmt.Sprintf(format, args...)})
}

// nodesToScore checks the percentage of nodes that kube-scheduler evaluates. A profile's value overrides the global one.
func (c *check) nodesToScore() {
	name := "percentageOfNodesToScore"
	global := len(c.config.Profiles) == 0
	for i := range c.config.Profiles {
		if share := c.config.Profiles[i].PercentageOfNodesToScore; share != nil {
			c.share(field.NewPath("profiles").Index(i).Child(name), share, true)
		} else {
			global = true
		}
	}
	c.share(field.NewPath(name), c.config.PercentageOfNodesToScore, global)
}

// share checks one percentage. used is false if each profile overrides it.
func (c *check) share(path *field.Path, share *int32, used bool) {
	value := ptr.Deref(share, 0)
	switch {
	case used && value < 100 && c.NodesToScore == 100:
		c.add(Warning, path, "%d: with more than 100 nodes, kube-scheduler offers the extender only a part of them, so a pod can be rejected although "+
			"another node has room, and stays pending until a retry; set 100, or the extender's --percentage-of-nodes-to-score to the same value", value)
	case used && value > 0 && int(value) < c.NodesToScore:
		c.add(Warning, path, "%d: less than the extender's --percentage-of-nodes-to-score (%d), so with more than 100 nodes the extender can take "+
			"kube-scheduler's part of the nodes for all of them; set both to the same value", value, c.NodesToScore)
	}
}

// backoff checks the longest time before kube-scheduler retries a rejected pod.
func (c *check) backoff() {
	path, hold := field.NewPath("podMaxBackoffSeconds"), c.GangHold
	longest := ptr.Deref(c.config.PodMaxBackoffSeconds, defaultMaxBackoff)
	switch misses := hold > 0 && longest >= int64(math.Ceil(hold.Seconds())); {
	case misses && c.config.PodMaxBackoffSeconds == nil:
		c.add(Warning, path, "missing: the default of %d seconds is not less than --gang-hold, %v, so the bind of one member can time out "+
			"before the next member is tried; set 5", longest, hold)
	case misses:
		c.add(Warning, path, "%d: not less than --gang-hold, %v, so the bind of one member can time out before the next member is tried", longest, hold)
	}
}

// extenders finds the entry for gpushare and checks all entries.
func (c *check) extenders() {
	path := field.NewPath("extenders")
	ours := -1
	for i := range c.config.Extenders {
		switch {
		case !c.isOurs(&c.config.Extenders[i]):
		case ours < 0:
			ours = i
		default:
			c.add(Error, path.Index(i), "a second entry for gpushare, after extenders[%d]: kube-scheduler rejects two entries that bind, or that "+
				"manage the same resource; remove one", ours)
		}
	}
	if ours < 0 {
		c.add(Error, path, "no entry for gpushare: add one that manages %s, with a urlPrefix that ends with %s", protocol.ResourceMemory, c.Path)
		return
	}
	c.entry(path.Index(ours), &c.config.Extenders[ours])
	for i := range c.config.Extenders {
		if !c.isOurs(&c.config.Extenders[i]) {
			c.other(path.Index(i), i, ours)
		}
	}
}

func (c *check) isOurs(e *schedulerv1.Extender) bool {
	manages := func(r schedulerv1.ExtenderManagedResource) bool { return r.Name == string(protocol.ResourceMemory) }
	return strings.HasSuffix(strings.TrimRight(e.URLPrefix, "/"), c.Path) || slices.ContainsFunc(e.ManagedResources, manages)
}

// entry checks the entry for gpushare.
func (c *check) entry(path *field.Path, e *schedulerv1.Extender) {
	c.target(path, e)
	c.verb(Error, path.Child("filterVerb"), e.FilterVerb, "filter", "pods are sent to nodes where no card has room")
	c.verb(Warning, path.Child("prioritizeVerb"), e.PrioritizeVerb, "prioritize", "--node-policy has no effect if there are few candidate nodes")
	c.verb(Error, path.Child("bindVerb"), e.BindVerb, "bind", "pods are bound without a card")
	c.verb(Warning, path.Child("preemptVerb"), e.PreemptVerb, "preempt", "kube-scheduler can evict pods from several cards without freeing any of them")
	switch weight := path.Child("weight"); {
	case e.PrioritizeVerb == "":
	case e.Weight <= 0:
		c.add(Error, weight, "%d: must be positive; set 100", e.Weight)
	case e.Weight < pluginScores/scoreOfWeight:
		c.add(Warning, weight, "%d: kube-scheduler's own scores, about %d in total, outweigh --node-policy; set 100", e.Weight, pluginScores)
	}
	timeout, text := e.HTTPTimeout.Duration, e.HTTPTimeout.Duration.String()
	if timeout == 0 {
		timeout, text = defaultHTTPTimeout, fmt.Sprintf("missing, and the default of %v", defaultHTTPTimeout)
	}
	if timeout <= c.GangHold+c.BindTimeout {
		c.add(Error, path.Child("httpTimeout"), "%s is not more than the sum of --gang-hold and --bind-timeout, %v and %v: kube-scheduler gives up "+
			"on binds that are still in progress",
			text, c.GangHold, c.BindTimeout)
	}
	if !e.NodeCacheCapable {
		c.add(Warning, path.Child("nodeCacheCapable"), "false: kube-scheduler sends whole Node objects, too much data in a large cluster; set true")
	}
	if e.Ignorable {
		c.add(Error, path.Child("ignorable"), "true: while the extender is unreachable, pods are bound without a card; set false")
	}
	c.resources(path.Child("managedResources"), e.ManagedResources)
}

func (c *check) verb(missing Severity, path *field.Path, got, want, consequence string) {
	switch got {
	case want:
	case "":
		c.add(missing, path, "missing: %s; set %s", consequence, want)
	default:
		c.add(Error, path, "%q: unknown to the extender; set %s", got, want)
	}
}

func (c *check) resources(path *field.Path, managed []schedulerv1.ExtenderManagedResource) {
	found := false
	for i, resource := range managed {
		switch {
		case resource.Name == string(protocol.ResourceCores):
			if resource.IgnoredByScheduler {
				c.add(Error, path.Index(i).Child("ignoredByScheduler"), "true: kube-scheduler doesn't count a node's cores, and doesn't preempt for them; set false")
			}
		case resource.Name == string(protocol.ResourceWholeCard): // For groups of whole cards.
			if resource.IgnoredByScheduler {
				c.add(Error, path.Index(i).Child("ignoredByScheduler"), "true: kube-scheduler doesn't count a node's whole cards; set false")
			}
		case resource.Name != string(protocol.ResourceMemory):
			c.add(Warning, path.Index(i), "%s: the extender doesn't manage it, but kube-scheduler lets it bind pods that ask for it; remove "+
				"the entry", resource.Name)
		case resource.IgnoredByScheduler:
			found = true
			c.add(Error, path.Index(i).Child("ignoredByScheduler"), "true: kube-scheduler doesn't count a node's GPU memory, and doesn't preempt for it; set false")
		default:
			found = true
		}
	}
	if !found {
		c.add(Error, path, "%s is missing: kube-scheduler doesn't send pods that ask for it to the extender, or sends all pods if the list is "+
			"empty; add it", protocol.ResourceMemory)
	}
}

// other checks the entry of another extender.
func (c *check) other(path *field.Path, i, ours int) {
	e, our := &c.config.Extenders[i], &c.config.Extenders[ours]
	if e.BindVerb != "" {
		c.add(Error, path.Child("bindVerb"), "%q: kube-scheduler accepts only one extender that binds, which is gpushare; remove it", e.BindVerb)
	}
	// kube-scheduler calls ignorable extenders after the others (k8s.io/kubernetes pkg/scheduler/scheduler.go, buildExtenders).
	after := i > ours
	if e.Ignorable != our.Ignorable {
		after = e.Ignorable
	}
	if e.FilterVerb != "" && after {
		c.add(Warning, path, "filters after gpushare (ignorable extenders always come last) and may reject the best nodes, the only ones that "+
			"gpushare passes at first: "+
			"put it before gpushare, not ignorable, or run gpushare-extender with --filter-best=0")
	}
}

// proxy checks whether kube-scheduler could call the extender through a proxy.
func (c *check) proxy(path *field.Path, target *url.URL) {
	if c.Proxy == nil {
		return
	}
	if proxy, err := c.Proxy(&http.Request{URL: target}); err != nil {
		c.add(Warning, path, "the proxy in this shell's environment can't be used: %v", err)
	} else if proxy != nil {
		c.add(Warning, path, "this shell's environment has the proxy %s for it. kubeadm copies that to kube-scheduler, which then calls the "+
			"extender through the proxy; "+
			"add %s to NO_PROXY, also in kube-scheduler.yaml", proxy.Redacted(), target.Hostname())
	}
}

// target checks the extender's URL and the authentication between kube-scheduler and extender.
func (c *check) target(path *field.Path, e *schedulerv1.Extender) {
	prefix := path.Child("urlPrefix")
	target, err := url.Parse(e.URLPrefix)
	if err != nil || target.Host == "" || target.Scheme != "http" && target.Scheme != "https" {
		c.add(Error, prefix, "%q: must be http:// or https://, followed by the extender's address and %s", e.URLPrefix, c.Path)
		return
	}
	if !strings.HasSuffix(strings.TrimRight(target.Path, "/"), c.Path) {
		c.add(Error, prefix, "%s: must end with %s", e.URLPrefix, c.Path)
	}
	switch target.Port() {
	case "":
		c.add(Warning, prefix, "%s: without a port kube-scheduler calls port 80, or 443 for https; the extender's is 12345 by default", e.URLPrefix)
	case c.PagePort:
		c.add(Error, prefix, "%s: %s is the port of the web page, which doesn't serve kube-scheduler; write that of --listen-address, 12345 by "+
			"default", e.URLPrefix, c.PagePort)
	}
	host := target.Hostname()
	if strings.HasSuffix(host, ".svc") || strings.Contains(host, ".svc.") {
		c.add(Warning, prefix, "%s: kube-scheduler in the host network can't resolve names of Services; use the Service's IP address", e.URLPrefix)
	}
	c.proxy(prefix, target)
	if target.Scheme == "https" {
		c.tls(path, e)
		return
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		c.add(Warning, prefix, "%s: plain HTTP to another host, so any client that can reach the extender can bind pods; use https with client "+
			"certificates", e.URLPrefix)
	}
	if e.EnableHTTPS || e.TLSConfig != nil {
		c.add(Warning, path.Child("tlsConfig"), "ignored, because urlPrefix starts with http://; use https://")
	}
}

func (c *check) tls(path *field.Path, e *schedulerv1.Extender) {
	config := e.TLSConfig
	if config == nil {
		config = &schedulerv1.ExtenderTLSConfig{}
	}
	path = path.Child("tlsConfig")
	hasCA := config.CAFile != "" || len(config.CAData) > 0
	hasCertificate, hasKey := config.CertFile != "" || len(config.CertData) > 0, config.KeyFile != "" || len(config.KeyData) > 0
	switch {
	case config.Insecure && hasCA:
		c.add(Error, path.Child("insecure"), "true: kube-scheduler rejects it together with a CA; remove it")
	case config.Insecure, e.EnableHTTPS && !hasCA:
		c.add(Warning, path, "the extender's certificate is not verified; set caFile or caData")
	}
	switch {
	case hasCertificate != hasKey:
		c.add(Error, path, "a client certificate needs its key, and the other way round; set both")
	case !hasCertificate:
		c.add(Warning, path, "no client certificate: an extender with --client-ca-file rejects kube-scheduler's calls; set certFile and keyFile")
	}
	c.certificate(path.Child("caData"), config.CAData, path.Child("caFile"), config.CAFile, false)
	c.certificate(path.Child("certData"), config.CertData, path.Child("certFile"), config.CertFile, true)
}

// certificate checks the first certificate of data, or of the file if there is no data. client is true for kube-scheduler's own.
func (c *check) certificate(path *field.Path, data []byte, filePath *field.Path, file string, client bool) {
	if len(data) == 0 && file != "" {
		path = filePath
		data, _ = c.ReadFile(file)
	}
	if len(data) == 0 {
		return
	}
	block, _ := pem.Decode(data)
	if block == nil {
		c.add(Error, path, "contains no PEM certificate")
		return
	}
	certificate, err := x509.ParseCertificate(block.Bytes)
	switch {
	case err != nil:
		c.add(Error, path, "can't be used: %v", err)
		return
	case c.Now.After(certificate.NotAfter):
		c.add(Error, path, "the certificate expired at %s: no call between kube-scheduler and extender succeeds; fetch the configuration, or the file, again",
			certificate.NotAfter.UTC().Format(time.RFC3339))
	case c.Now.Before(certificate.NotBefore):
		c.add(Error, path, "the certificate isn't valid before %s: check the clocks", certificate.NotBefore.UTC().Format(time.RFC3339))
	}
	if name := certificate.Subject.CommonName; client && len(c.ClientNames) > 0 && !slices.Contains(c.ClientNames, name) {
		c.add(Error, path, "the certificate has the common name %.64q, and the extender's --client-names allows %s: the extender rejects kube-scheduler's calls",
			name, strings.Join(c.ClientNames, ", "))
	}
}
