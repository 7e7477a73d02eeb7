package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/gpushare/gpushare/cmd/internal/flagenv"
	"github.com/gpushare/gpushare/cmd/internal/logflags"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/version"
)

// options are what the flags say.
type options struct {
	kubeconfig    string
	listenAddress string
	healthAddress string
	tlsCertFile   string
	tlsKeyFile    string
	clientCAFile  string
	clientNames   []string
	ui            bool
	uiAddress     string
	// uiAddressGiven says that uiAddress isn't the default.
	uiAddressGiven   bool
	authorizeMetrics bool
	logging          *logsapi.LoggingConfiguration
	cardPolicy       string
	nodePolicy       string
	filterBest       int
	bestAbove        int
	bindTimeout      time.Duration
	bindWindow       time.Duration
	gangs            gangs
	// evictFragmented is off by default: evicting is kube-scheduler's business otherwise.
	evictFragmented bool
	election        election
	cardMetrics     bool
	qps             float32
	burst           int
}

// gangs is what the flags say about groups of pods.
type gangs struct {
	hold          time.Duration
	patience      time.Duration
	claimAfter    time.Duration
	failurePolicy string
}

// election is what the flags say about replicas.
type election struct {
	elect         bool
	namespace     string
	service       string
	address       string
	leaseDuration time.Duration
	renewDeadline time.Duration
	retryPeriod   time.Duration
}

func newCommand() *cobra.Command {
	o := options{logging: logsapi.NewLoggingConfiguration()}
	command := &cobra.Command{
		Use:   "gpushare-extender",
		Short: "Scheduler extender that shares GPU cards between pods by memory",
		Long: `gpushare-extender answers kube-scheduler's filter, prioritize, preempt and bind calls for pods that ask for
aliyun.com/gpu-mem: it knows how much of which card is taken, lets only nodes pass on which one card has room, and binds
a pod together with the annotations that name its card.

It keeps no state of its own: after a restart it rebuilds itself from the API server.

Each flag can be given as an environment variable as well, named like the flag in capitals: LISTEN_ADDRESS for
--listen-address. The flag wins.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.Get().String(),
		PreRunE: func(command *cobra.Command, _ []string) error {
			return flagenv.Set(command.Flags(), os.LookupEnv)
		},
		RunE: func(command *cobra.Command, _ []string) error {
			o.uiAddressGiven = command.Flags().Changed("ui-listen-address")
			if err := logflags.Apply(o.logging); err != nil {
				return err
			}
			if err := o.validate(); err != nil {
				return err
			}
			return serve(command.Context(), o)
		},
	}
	f := command.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file`; the pod's own service account where empty")
	f.StringVar(&o.listenAddress, "listen-address", ":12345", "`address` to answer on")
	f.StringVar(&o.healthAddress, "health-address", "", "`address` of /livez, /readyz, /metrics and /version in plain HTTP, for probes that can't reach --listen-address or have no certificate to show there; other clients' connections can't keep them from being answered; off where empty")
	f.StringVar(&o.tlsCertFile, "tls-cert-file", "", "certificate `file` (PEM), read again when it changes; plain HTTP where empty")
	f.StringVar(&o.tlsKeyFile, "tls-key-file", "", "key `file` (PEM) of the certificate")
	f.StringVar(&o.clientCAFile, "client-ca-file", "", "CA `file` (PEM), read again when it changes; where given, clients must show a certificate that it signed")
	f.StringSliceVar(&o.clientNames, "client-names", []string{"kube-scheduler"}, "`names`, one of which a client's certificate must have as its common name to call anything below /gpushare-scheduler; with --client-ca-file")
	f.BoolVar(&o.ui, "ui", true, "serve the web page at /ui of --ui-listen-address; it shows what inspect shows and changes nothing")
	f.StringVar(&o.uiAddress, "ui-listen-address", "127.0.0.1:12346", "`address` of the web page, where no client certificate is asked for")
	f.BoolVar(&o.authorizeMetrics, "authorize-metrics", false, "answer /metrics only for clients with a bearer token that may get the path /metrics; needs the right to create TokenReviews and SubjectAccessReviews")
	f.StringVar(&o.cardPolicy, "card-policy", placement.Binpack.String(), "how to choose among the cards of a node: binpack or spread")
	f.StringVar(&o.nodePolicy, "node-policy", placement.Binpack.String(), "how to score nodes: binpack or spread")
	f.IntVar(&o.filterBest, "filter-best", 1, "how many nodes filter passes at most where more than --filter-best-above are on offer: of those that share the best score the most suitable; 0 always passes every node that fits, for schedulers that ask other extenders after this one")
	f.IntVar(&o.bestAbove, "filter-best-above", 32, "up to how many nodes on offer filter passes every one that fits, with the reasons of the others")
	f.DurationVar(&o.bindTimeout, "bind-timeout", defaultBindTimeout, "time that one bind may take; must lie below the httpTimeout in kube-scheduler's configuration")
	f.DurationVar(&o.bindWindow, "bind-window", 150*time.Millisecond, "the longest that a bind waits to be sent together with others, in a storm of pods; a quarter of --bind-timeout at most; 0 sends each at once")
	f.BoolVar(&o.evictFragmented, "evict-fragmented", false, "evict pods of lower priority from one card where a node's free GPU memory would do for a pod and no card's does; needs the right to create pods/eviction")
	g := &o.gangs
	f.DurationVar(&g.hold, "gang-hold", defaultGangHold, "how long a bind waits for the other members of the pod's group; with --bind-timeout it must lie below the httpTimeout in kube-scheduler's configuration; 0 ignores groups")
	f.DurationVar(&g.patience, "gang-patience", 30*time.Second, "how long places are kept for a group's members to come, and how long a group may stay bound in part")
	f.DurationVar(&g.claimAfter, "gang-claim-after", 2*time.Minute, "how long a group waits before memory that comes free is kept for it, for a bounded time; 0 never keeps any")
	f.StringVar(&g.failurePolicy, "gang-failure-policy", string(gang.Evict), "what becomes of running members whose group stays bound in part: evict or keep")
	e := &o.election
	f.BoolVar(&e.elect, "leader-elect", false, "run beside other replicas: one is elected by a Lease and answers, the others stand by")
	f.StringVar(&e.namespace, "leader-elect-namespace", "kube-system", "`namespace` of the Lease and of the published Service")
	f.DurationVar(&e.leaseDuration, "leader-elect-lease-duration", leader.DefaultLeaseDuration, "how long the others wait for a leader that is silent")
	f.DurationVar(&e.renewDeadline, "leader-elect-renew-deadline", leader.DefaultRenewDeadline, "how long a leader counts on a renewal of its Lease; less than the lease duration, more than --bind-timeout")
	f.DurationVar(&e.retryPeriod, "leader-elect-retry-period", leader.DefaultRetryPeriod, "how often a leader renews its Lease, and others try for it")
	f.StringVar(&e.service, "publish-service", "gpushare-extender", "`name` of the Service without selector that the leader leads to itself, with --leader-elect and --advertise-address")
	f.StringVar(&e.address, "advertise-address", "", "`IP address` that the leader publishes; nothing is published where empty")
	f.BoolVar(&o.cardMetrics, "card-metrics", true, "report each card on /metrics (four series a card), beside the cluster's sums")
	f.Float32Var(&o.qps, "kube-api-qps", 1000, "requests a second to the API server, Events left out")
	f.IntVar(&o.burst, "kube-api-burst", 2000, "requests to the API server in one burst")

	logflags.Add(f, o.logging)
	command.CompletionOptions.DisableDefaultCmd = true
	command.AddCommand(newCheckCommand())
	return command
}

// What check-scheduler-config must know.
const (
	defaultBindTimeout = 4 * time.Second
	defaultGangHold    = 10 * time.Second
)

// maxHold bounds what a call is held for, and what its bind may take: together they stay within what the server gives any
// call.
const maxHold = time.Minute

// maxWindow bounds for how long binds are gathered.
const maxWindow = 500 * time.Millisecond

func (o options) validate() error {
	if _, err := placement.ParsePolicy(o.cardPolicy); err != nil {
		return fmt.Errorf("--card-policy: %w", err)
	}
	if _, err := placement.ParsePolicy(o.nodePolicy); err != nil {
		return fmt.Errorf("--node-policy: %w", err)
	}
	switch {
	case o.filterBest < 0:
		return errors.New("--filter-best must not be negative")
	case o.bestAbove < 0:
		return errors.New("--filter-best-above must not be negative")
	case (o.tlsCertFile == "") != (o.tlsKeyFile == ""):
		return errors.New("--tls-cert-file and --tls-key-file go together")
	case o.clientCAFile != "" && o.tlsCertFile == "":
		return errors.New("--client-ca-file needs --tls-cert-file and --tls-key-file")
	case o.clientCAFile != "" && (len(o.clientNames) == 0 || slices.Contains(o.clientNames, "")):
		return errors.New("--client-names must not be empty or have an empty name: --client-ca-file may have signed certificates of others than kube-scheduler")
	case o.uiAddressGiven && !o.ui:
		return errors.New("--ui-listen-address needs --ui")
	case o.ui && o.uiAddress == "":
		return errors.New("--ui-listen-address is empty: --ui=false switches the page off")
	case o.bindTimeout <= 0 || o.bindTimeout > maxHold:
		return fmt.Errorf("--bind-timeout must be positive, and %v at most", maxHold)
	case o.bindWindow < 0 || o.bindWindow > maxWindow:
		return fmt.Errorf("--bind-window must lie between 0 and %v", maxWindow)
	case o.gangs.hold < 0 || o.gangs.hold > maxHold:
		return fmt.Errorf("--gang-hold must lie between 0 and %v", maxHold)
	case o.gangs.hold > 0 && o.gangs.patience < o.gangs.hold:
		return errors.New("--gang-patience must not lie below --gang-hold")
	case o.gangs.claimAfter < 0:
		return errors.New("--gang-claim-after must not be negative")
	case o.gangs.failurePolicy != string(gang.Evict) && o.gangs.failurePolicy != string(gang.Keep):
		return fmt.Errorf("--gang-failure-policy: unknown policy %q: want %s or %s", o.gangs.failurePolicy, gang.Evict, gang.Keep)
	case o.election.elect && o.bindTimeout >= o.election.renewDeadline:
		return errors.New("--bind-timeout must lie below --leader-elect-renew-deadline: a bind must not outlive a leader's Lease")
	case o.qps <= 0 || o.burst <= 0:
		return errors.New("--kube-api-qps and --kube-api-burst must be positive")
	}
	return nil
}
