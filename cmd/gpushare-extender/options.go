package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/cmd/internal/flagenv"
	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/version"
)

// options are what the flags say.
type options struct {
	kubeconfig    string
	listenAddress string
	tlsCertFile   string
	tlsKeyFile    string
	clientCAFile  string
	cardPolicy    string
	nodePolicy    string
	bindTimeout   time.Duration
	election      election
	qps           float32
	burst         int
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
	var o options
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
			if err := o.validate(); err != nil {
				return err
			}
			return serve(command.Context(), o)
		},
	}
	f := command.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file`; the pod's own service account where empty")
	f.StringVar(&o.listenAddress, "listen-address", ":12345", "`address` to answer on")
	f.StringVar(&o.tlsCertFile, "tls-cert-file", "", "certificate `file` (PEM), read again when it changes; plain HTTP where empty")
	f.StringVar(&o.tlsKeyFile, "tls-key-file", "", "key `file` (PEM) of the certificate")
	f.StringVar(&o.clientCAFile, "client-ca-file", "", "CA `file` (PEM); where given, clients must show a certificate that it signed")
	f.StringVar(&o.cardPolicy, "card-policy", placement.Binpack.String(), "how to choose among the cards of a node: binpack or spread")
	f.StringVar(&o.nodePolicy, "node-policy", placement.Binpack.String(), "how to score nodes: binpack or spread")
	f.DurationVar(&o.bindTimeout, "bind-timeout", 4*time.Second, "time that one bind may take; must lie below the httpTimeout in kube-scheduler's configuration")
	e := &o.election
	f.BoolVar(&e.elect, "leader-elect", false, "run beside other replicas: one is elected by a Lease and answers, the others stand by")
	f.StringVar(&e.namespace, "leader-elect-namespace", "kube-system", "`namespace` of the Lease and of the published Service")
	f.DurationVar(&e.leaseDuration, "leader-elect-lease-duration", leader.DefaultLeaseDuration, "how long the others wait for a leader that is silent")
	f.DurationVar(&e.renewDeadline, "leader-elect-renew-deadline", leader.DefaultRenewDeadline, "how long a leader counts on a renewal of its Lease; less than the lease duration, more than --bind-timeout")
	f.DurationVar(&e.retryPeriod, "leader-elect-retry-period", leader.DefaultRetryPeriod, "how often a leader renews its Lease, and others try for it")
	f.StringVar(&e.service, "publish-service", "gpushare-extender", "`name` of the Service without selector that the leader leads to itself, with --leader-elect and --advertise-address")
	f.StringVar(&e.address, "advertise-address", "", "`IP address` that the leader publishes; nothing is published where empty")
	f.Float32Var(&o.qps, "kube-api-qps", 1000, "requests a second to the API server, Events left out")
	f.IntVar(&o.burst, "kube-api-burst", 2000, "requests to the API server in one burst")

	logging := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(logging)
	f.AddGoFlag(logging.Lookup("v"))
	return command
}

func (o options) validate() error {
	if _, err := placement.ParsePolicy(o.cardPolicy); err != nil {
		return fmt.Errorf("--card-policy: %w", err)
	}
	if _, err := placement.ParsePolicy(o.nodePolicy); err != nil {
		return fmt.Errorf("--node-policy: %w", err)
	}
	switch {
	case (o.tlsCertFile == "") != (o.tlsKeyFile == ""):
		return errors.New("--tls-cert-file and --tls-key-file go together")
	case o.clientCAFile != "" && o.tlsCertFile == "":
		return errors.New("--client-ca-file needs --tls-cert-file and --tls-key-file")
	case o.bindTimeout <= 0:
		return errors.New("--bind-timeout must be positive")
	case o.election.elect && o.bindTimeout >= o.election.renewDeadline:
		return errors.New("--bind-timeout must lie below --leader-elect-renew-deadline: a bind must not outlive a leader's Lease")
	case o.qps <= 0 || o.burst <= 0:
		return errors.New("--kube-api-qps and --kube-api-burst must be positive")
	}
	return nil
}
