package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpushare/gpushare/cmd/internal/program"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/schedulerconfig"
	"github.com/gpushare/gpushare/pkg/scheduling"
)

// options are the values of the flags.
type options struct {
	kubeconfig    string
	listenAddress string
	healthAddress string
	tlsCertFile   string
	tlsKeyFile    string
	clientCAFile  string
	clientNames   []string
	// ui is false with --ui=false, which an empty uiAddress replaces.
	ui        bool
	uiAddress string
	// uiAddressGiven is true if the flag was set.
	uiAddressGiven   bool
	authorizeMetrics bool
	cardPolicy       string
	nodePolicy       string
	nodesToScore     int
	// maxIdle is scheduling.ReservationOptions.MaxIdle in percent.
	maxIdle       float64
	overusePolicy string
	fairShare     fairShare
	election      election
	cardMetrics   bool
	// scheduling has the fields that flags set as they are.
	scheduling scheduling.Options
}

// waitBound returns how long the first item of the queue waits at most if the pods on its cards run for --reservation-max-age at most
// (docs/design.md, "The promise"), without what kube-scheduler needs; 0 without reservations.
func (o *options) waitBound() time.Duration {
	if o.maxIdle <= 0 {
		return 0
	}
	return 4 * o.scheduling.Reservations.MaxAge
}

// fairShare are the values of the flags for fair sharing.
type fairShare struct {
	mode, by string
	// reclaimAfter is used by reclaim only.
	reclaimAfter time.Duration
}

// The values of --fair-share.
const (
	fairShareOff      = "off"
	fairShareDispatch = "dispatch"
	fairShareReclaim  = "reclaim"
)

// election are the values of the flags for leader election.
type election struct {
	elect bool
	// options has the fields that flags set.
	options leader.Options
	service string
	address string
}

// The values of --overuse-policy.
const (
	overuseReport = "report"
	overuseEvict  = "evict"
)

func newCommand() *cobra.Command {
	var o options
	command := program.New(component, os.LookupEnv)
	command.Short = "Scheduler extender that shares GPU cards between pods by memory"
	command.Long = `gpushare-extender answers kube-scheduler's filter, prioritize, preempt and bind calls for pods that ask for
aliyun.com/gpu-mem. It keeps the allocated memory of each card, passes only nodes with a card that has room for the pod,
and binds the pod together with the annotations that name its card.

It keeps no state of its own: after a restart it reads it from the API server.

Each flag can also be set by an environment variable with the flag's name in upper case: LISTEN_ADDRESS for
--listen-address. The flag takes precedence.`
	command.RunE = func(command *cobra.Command, _ []string) error {
		o.uiAddressGiven = command.Flags().Changed("ui-listen-address")
		if err := o.validate(); err != nil {
			return err
		}
		return serve(command.Context(), o)
	}
	f := command.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file`; if empty, the pod's service account is used")
	f.StringVar(&o.listenAddress, "listen-address", ":12345", "`address` for kube-scheduler's calls, and for /livez, /readyz, /metrics and /version")
	f.StringVar(&o.healthAddress, "health-address", "", "additional `address` of /livez, /readyz, /metrics and /version in plain HTTP, for probes that can't reach --listen-address or have no client certificate; however many connections other clients open. If empty, it is not served")
	f.StringVar(&o.tlsCertFile, "tls-cert-file", "", "`file` with the server's certificate (PEM), reloaded when it changes; needs --tls-key-file. If empty, the extender serves plain HTTP")
	f.StringVar(&o.tlsKeyFile, "tls-key-file", "", "`file` with the private key (PEM) of --tls-cert-file, reloaded when it changes")
	f.StringVar(&o.clientCAFile, "client-ca-file", "", "`file` with CA certificates (PEM), reloaded when it changes; if set, clients must present a certificate that one of them signed")
	f.StringSliceVar(&o.clientNames, "client-names", []string{defaultClientName}, "`names` of which a client's certificate must have one as its common name to call the verbs below /gpushare-scheduler; only with --client-ca-file")
	f.StringVar(&o.uiAddress, "ui-listen-address", "127.0.0.1:12346", "`address` of the read-only web page at /ui; if empty, it is not served. No client certificate is required there, so set a reachable address only if every client that reaches it may see the pods")
	f.BoolVar(&o.authorizeMetrics, "authorize-metrics", false, "serve /metrics only to clients with a bearer token that may get the path /metrics; needs the permission to create TokenReviews and SubjectAccessReviews")
	f.StringVar(&o.cardPolicy, "card-policy", placement.Policies()[0].String(), "how a card is chosen among those of a node with enough free memory: "+placement.Choices(placement.Policies()))
	f.StringVar(&o.nodePolicy, "node-policy", placement.NodePolicies()[0].String(), "which nodes are scored higher: "+placement.Choices(placement.NodePolicies()))
	f.IntVar(&o.scheduling.FilterBest, "filter-best", 1, "with more than 32 candidate nodes, filter returns at most this many, all with the best score. 0 returns every node that fits: use 0 if another extender filters after this one")
	f.DurationVar(&o.scheduling.BindTimeout, "bind-timeout", defaultBindTimeout, "maximum duration of a bind, without the time for which a group is held: 1m at most, and less than the httpTimeout in kube-scheduler's configuration. Increase it if binds time out because the API server is slow")
	f.IntVar(&o.nodesToScore, "percentage-of-nodes-to-score", 100, "percentageOfNodesToScore in kube-scheduler's configuration. With less than 100, pods that fit no node of kube-scheduler's sample are nominated to other nodes; this needs the right to patch pods/status")
	f.DurationVar(&o.scheduling.BindWindow, "bind-window", 150*time.Millisecond, "while pods queue, binds are collected for up to this time and sent together; 500ms at most. 0 sends each at once")
	f.BoolVar(&o.scheduling.EvictFragmented, "evict-fragmented", false, "evict pods of lower priority from one card for a pod that only fragmentation keeps pending (docs/preemption.md); no PodDisruptionBudget is violated. Needs the permission to create pods/eviction")
	f.StringVar(&o.overusePolicy, "overuse-policy", overuseReport, "what happens to pods that use more GPU memory than they request: report, or evict where other pods lack it (docs/limits.md). evict needs the permission to create pods/eviction")
	f.Float64Var(&o.maxIdle, "reservation-max-idle", 2, "percentage of the GPU memory that may be reserved on cards in use, for pods and groups that wait for memory (docs/gangs.md). With more, large pods and groups run sooner, and more memory is idle meanwhile; 0 turns these reservations off")
	f.DurationVar(&o.scheduling.Reservations.MaxAge, "reservation-max-age", time.Hour, "only cards on which no pod that must end has run for longer than this are reserved: pods that have run for long are expected to stay")
	g := &o.scheduling.Gangs
	f.DurationVar(&g.Hold, "gang-hold", defaultGangHold, "maximum time for which a bind is held until all members of the pod's group have arrived: 1m at most, and with --bind-timeout less than the httpTimeout in kube-scheduler's configuration. 0 turns off groups: their members are bound one by one")
	f.DurationVar(&g.Patience, "gang-patience", 30*time.Second, "time for which cards that are reserved for a group, or with fair sharing for a pod whose turn has come, are kept until the pods arrive, and for which a group may stay partially bound; not less than --gang-hold")
	f.BoolVar(&g.Native, "native-groups", false, "place the pods of a Kubernetes PodGroup (spec.schedulingGroup) all together or not at all; needs Kubernetes 1.37 with the feature gate GenericWorkload, and the right to list and watch podgroups. Without it they are placed one by one")
	f.StringVar((*string)(&g.OnFailure), "gang-failure-policy", string(gang.Evict), "what happens to the bound members of a group that stays partially bound: evict or keep")
	s, fair := &o.fairShare, &o.scheduling.FairShare
	f.StringVar(&s.mode, "fair-share", fairShareOff, "how tenants share the GPU memory of the cluster (docs/fair-share.md): off; dispatch, by the order in which pods are scheduled; or reclaim, also by evicting pods of tenants above their share. Both need the permissions to patch pods and to list namespaces, reclaim also that to create pods/eviction")
	f.StringVar(&s.by, "fair-share-by", dispatch.ByNamespace, "what a tenant is: namespace, or label:KEY for all namespaces with the same value of that label")
	f.Int32Var(&fair.PriorityCutoff, "fair-share-priority-cutoff", dispatch.DefaultPriorityCutoff, "pods with this `priority` or a higher one are scheduled without waiting for their turn; the default is that of the class system-cluster-critical")
	f.IntVar(&fair.Provisioning, "fair-share-provisioning", 1, "number of pods or groups of each tenant whose gates are removed although they fit nowhere, so that cluster-autoscaler adds nodes for them")
	f.DurationVar(&s.reclaimAfter, "fair-share-reclaim-after", 5*time.Minute, "time for which a tenant must be below its share before pods of others are evicted for it; only with --fair-share=reclaim")
	f.DurationVar(&fair.MinRuntime, "fair-share-min-runtime", 10*time.Minute, "time for which a pod must have run before it can be evicted for another tenant; only with --fair-share=reclaim")
	e := &o.election
	f.BoolVar(&e.elect, "leader-elect", false, "elect a leader among several replicas by a Lease; the leader answers kube-scheduler, the others are standbys. Set it on all replicas if there is more than one")
	f.StringVar(&e.options.Namespace, "leader-elect-namespace", "kube-system", "`namespace` of the Lease, of --publish-service, and of the ConfigMap gpushare-evictions, in which the eviction of a group is recorded before it begins")
	f.DurationVar(&e.options.LeaseDuration, "leader-elect-lease-duration", leader.DefaultLeaseDuration, "time after the leader's last renewal after which a standby may take over, in whole seconds; the same on all replicas")
	f.DurationVar(&e.options.RenewDeadline, "leader-elect-renew-deadline", leader.DefaultRenewDeadline, "time after its last renewal for which the leader answers; less than the lease duration, more than --bind-timeout")
	f.DurationVar(&e.options.RetryPeriod, "leader-elect-retry-period", leader.DefaultRetryPeriod, "interval at which the leader renews its Lease and standbys try to acquire it")
	f.StringVar(&e.service, "publish-service", "gpushare-extender", "`name` of a Service without selector whose only endpoint is the leader; only with --leader-elect and --advertise-address")
	f.StringVar(&e.address, "advertise-address", "", "`IP address` of this replica, which it publishes as the endpoint of --publish-service while it is the leader; if empty, nothing is published")
	f.BoolVar(&o.cardMetrics, "card-metrics", true, "serve series for each card on /metrics, in addition to the cluster's sums; a standby serves none; turn it off if these are too many series")
	o.addFormerFlags(f)

	command.CompletionOptions.DisableDefaultCmd = true
	command.AddCommand(newCheckCommand())
	return command
}

// addFormerFlags adds the flags that the next minor version won't have. Each warns when it is set.
func (o *options) addFormerFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.ui, "ui", true, "")
	_ = f.MarkDeprecated("ui", "an empty --ui-listen-address turns off the web page") // The flag exists.
	for name, instead := range map[string]string{
		"gang-claim-after":  "cards are reserved without a wait; use --reservation-max-idle=0 to turn that off",
		"filter-best-above": "it has no effect: filter returns all nodes that fit of up to 32 candidate nodes, or of any number with --filter-best=0",
		"kube-api-burst":    "it has no effect",
		"kube-api-qps":      "it has no effect: the extender sends the API server 1,000 requests in a second at most",
	} {
		f.String(name, "", "")
		_ = f.MarkDeprecated(name, instead) // As above.
	}
}

// The defaults that check-scheduler-config needs too.
const (
	defaultBindTimeout = 4 * time.Second
	defaultClientName  = "kube-scheduler"
	defaultGangHold    = 10 * time.Second
)

const (
	// maxHold is the maximum of --gang-hold and of --bind-timeout. Their sum stays within the server's timeout of a call.
	maxHold = time.Minute
	// maxWindow is the maximum of --bind-window.
	maxWindow = 500 * time.Millisecond
	// filterBestAbove is the number of candidate nodes above which --filter-best counts.
	filterBestAbove = 32
)

// sampleSize returns scheduling.Options.SampleSize.
func (o options) sampleSize() func(nodes int) int {
	if o.nodesToScore == 100 {
		return nil
	}
	return func(nodes int) int { return schedulerconfig.SampleSize(o.nodesToScore, nodes) }
}

func (o options) validate() error {
	if _, err := placement.ParsePolicy(o.cardPolicy, placement.Policies()); err != nil {
		return fmt.Errorf("--card-policy: %w", err)
	}
	if _, err := placement.ParsePolicy(o.nodePolicy, placement.NodePolicies()); err != nil {
		return fmt.Errorf("--node-policy: %w", err)
	}
	if _, err := dispatch.TenantLabel(o.fairShare.by); err != nil {
		return err
	}
	settings := &o.scheduling
	switch {
	case settings.FilterBest < 0:
		return errors.New("--filter-best must not be negative")
	case (o.tlsCertFile == "") != (o.tlsKeyFile == ""):
		return errors.New("--tls-cert-file and --tls-key-file must be set together")
	case o.clientCAFile != "" && o.tlsCertFile == "":
		return errors.New("--client-ca-file needs --tls-cert-file and --tls-key-file")
	case o.clientCAFile != "" && (len(o.clientNames) == 0 || slices.Contains(o.clientNames, "")):
		return errors.New("--client-names must not be empty or have an empty name: the CA of --client-ca-file can have signed other certificates than kube-scheduler's")
	case settings.BindTimeout <= 0 || settings.BindTimeout > maxHold:
		return fmt.Errorf("--bind-timeout must be positive, and %v at most", maxHold)
	case o.nodesToScore < 0 || o.nodesToScore > 100:
		return errors.New("--percentage-of-nodes-to-score must be between 0 and 100")
	case settings.BindWindow < 0 || settings.BindWindow > maxWindow:
		return fmt.Errorf("--bind-window must be between 0 and %v", maxWindow)
	case settings.Gangs.Hold < 0 || settings.Gangs.Hold > maxHold:
		return fmt.Errorf("--gang-hold must be between 0 and %v", maxHold)
	case settings.Gangs.Patience <= 0 || settings.Gangs.Patience < settings.Gangs.Hold:
		return errors.New("--gang-patience must be positive, and not less than --gang-hold")
	case settings.Gangs.Native && settings.Gangs.Hold == 0:
		return errors.New("--native-groups needs groups: --gang-hold must not be 0")
	case !(o.maxIdle >= 0 && o.maxIdle <= 100): // NaN too.
		return errors.New("--reservation-max-idle must be between 0 and 100")
	case settings.Reservations.MaxAge <= 0:
		return errors.New("--reservation-max-age must be positive")
	case settings.Gangs.OnFailure != gang.Evict && settings.Gangs.OnFailure != gang.Keep:
		return fmt.Errorf("--gang-failure-policy: unknown policy %q: want %s or %s", settings.Gangs.OnFailure, gang.Evict, gang.Keep)
	case o.overusePolicy != overuseReport && o.overusePolicy != overuseEvict:
		return fmt.Errorf("--overuse-policy: unknown policy %q: want %s or %s", o.overusePolicy, overuseReport, overuseEvict)
	case !slices.Contains([]string{fairShareOff, fairShareDispatch, fairShareReclaim}, o.fairShare.mode):
		return fmt.Errorf("--fair-share: unknown mode %q: want %s, %s or %s", o.fairShare.mode, fairShareOff, fairShareDispatch, fairShareReclaim)
	case settings.FairShare.Provisioning < 0:
		return errors.New("--fair-share-provisioning must not be negative")
	case o.fairShare.reclaimAfter <= 0:
		return errors.New("--fair-share-reclaim-after must be positive")
	case settings.FairShare.MinRuntime < 0:
		return errors.New("--fair-share-min-runtime must not be negative")
	case o.election.elect && settings.BindTimeout >= o.election.options.RenewDeadline:
		return errors.New("--bind-timeout must be less than --leader-elect-renew-deadline: a bind must not outlive a leader's Lease")
	}
	return nil
}
