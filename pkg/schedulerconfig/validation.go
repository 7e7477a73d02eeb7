package schedulerconfig

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/component-base/config"
	configv1alpha1 "k8s.io/component-base/config/v1alpha1"
	configvalidation "k8s.io/component-base/config/validation"
	schedulerv1 "k8s.io/kube-scheduler/config/v1"
	"k8s.io/utils/ptr"
)

// The functions in this file check what kube-scheduler itself refuses at its start (k8s.io/kubernetes
// pkg/scheduler/apis/config/validation, ValidateKubeSchedulerConfiguration), as far as it has nothing to do with gpushare. They don't check
// names of plugins, which differ between versions, and the values of their arguments.

// leases is the only lock that kube-scheduler supports.
const leases = "leases"

// general checks the fields that concern kube-scheduler as a whole.
func (c *check) general() {
	if parallelism := ptr.Deref(c.config.Parallelism, 1); parallelism <= 0 {
		c.add(Error, field.NewPath("parallelism"), "%d: must be positive", parallelism)
	}
	c.leaderElection()
	if burst := c.config.ClientConnection.Burst; burst < 0 {
		c.add(Error, field.NewPath("clientConnection", "burst"), "%d: must not be negative", burst)
	}
}

func (c *check) leaderElection() {
	// Without a value, these three have kube-scheduler's own defaults (k8s.io/kubernetes pkg/scheduler/apis/config/v1/defaults.go).
	path, given, election := field.NewPath("leaderElection"), c.config.LeaderElection.DeepCopy(), config.LeaderElectionConfiguration{}
	given.ResourceLock = cmp.Or(given.ResourceLock, leases)
	given.ResourceName = cmp.Or(given.ResourceName, schedulerv1.SchedulerDefaultLockObjectName)
	given.ResourceNamespace = cmp.Or(given.ResourceNamespace, schedulerv1.SchedulerDefaultLockObjectNamespace)
	configv1alpha1.RecommendedDefaultLeaderElectionConfiguration(given)
	if err := configv1alpha1.Convert_v1alpha1_LeaderElectionConfiguration_To_config_LeaderElectionConfiguration(given, &election, nil); err != nil {
		c.add(Error, path, "%v", err)
		return
	}
	if election.LeaderElect && election.ResourceLock != leases {
		c.add(Error, path.Child("resourceLock"), "%s: kube-scheduler supports only %s; remove it", election.ResourceLock, leases)
	}
	for _, err := range configvalidation.ValidateLeaderElectionConfiguration(&election, path) {
		c.findings = append(c.findings, Finding{Error, err.Field, err.Detail})
	}
}

// profileNames checks that each profile has a name of its own, and that all have the same queue.
func (c *check) profileNames() {
	profiles, path := c.config.Profiles, field.NewPath("profiles")
	first := map[string]int{}
	for i := range profiles {
		p := &profiles[i]
		name, at := ptr.Deref(p.SchedulerName, ""), path.Index(i).Child("schedulerName")
		if p.SchedulerName == nil && len(profiles) == 1 {
			name = corev1.DefaultSchedulerName
		}
		before, known := first[name]
		switch {
		case name == "":
			c.add(Error, at, "missing: each profile needs a name of its own; set it")
		case known:
			c.add(Error, at, "%s: profiles[%d] has this name; rename or remove one", name, before)
		default:
			first[name] = i
		}
		for j := range p.PluginConfig {
			if plugin := p.PluginConfig[j].Name; slices.ContainsFunc(p.PluginConfig[:j], func(o schedulerv1.PluginConfig) bool { return o.Name == plugin }) {
				c.add(Error, path.Index(i).Child("pluginConfig").Index(j), "%s: a second entry for this plugin; merge them", plugin)
			}
		}
		if !apiequality.Semantic.DeepEqual(queueSort(&profiles[0]), queueSort(p)) {
			c.add(Error, path.Index(i).Child("plugins", "queueSort"), "differs from that of profiles[0]: all profiles share one queue; set the same")
		}
	}
}

func queueSort(p *schedulerv1.KubeSchedulerProfile) schedulerv1.PluginSet {
	if p.Plugins == nil {
		return schedulerv1.PluginSet{}
	}
	return p.Plugins.QueueSort
}

// managedResources checks the names of all extenders' resources.
func (c *check) managedResources() {
	first := map[string]*field.Path{}
	for i := range c.config.Extenders {
		for j, resource := range c.config.Extenders[i].ManagedResources {
			path := field.NewPath("extenders").Index(i).Child("managedResources").Index(j).Child("name")
			before, known := first[resource.Name]
			switch {
			case known:
				c.add(Error, path, "%s: kube-scheduler rejects a resource that is named twice, here and at %v; remove one", resource.Name, before)
			case !isExtendedResource(resource.Name):
				c.add(Error, path, "%q: not the name of an extended resource, such as example.com/fpga; correct or remove it", resource.Name)
			default:
				first[resource.Name] = path
			}
		}
	}
}

// isExtendedResource is IsExtendedResourceName of k8s.io/kubernetes pkg/apis/core/v1/helper.
func isExtendedResource(name string) bool {
	native := !strings.Contains(name, "/") || strings.Contains(name, corev1.ResourceDefaultNamespacePrefix)
	return !native && !strings.HasPrefix(name, corev1.DefaultResourceRequestsPrefix) && len(validation.IsQualifiedName(name)) == 0 &&
		len(validation.IsQualifiedName(corev1.DefaultResourceRequestsPrefix+name)) == 0
}
