package main

import (
	"errors"
	"flag"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

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
	qps           float32
	burst         int
}

func newCommand() *cobra.Command {
	var o options
	command := &cobra.Command{
		Use:   "gpushare-extender",
		Short: "Scheduler extender that shares GPU cards between pods by memory",
		Long: `gpushare-extender answers kube-scheduler's filter, prioritize and bind calls for pods that ask for
aliyun.com/gpu-mem: it knows how much of which card is taken, lets only nodes pass on which one card has room, and binds
a pod together with the annotations that name its card.

It keeps no state of its own: after a restart it rebuilds itself from the API server.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.Get().String(),
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
	case o.qps <= 0 || o.burst <= 0:
		return errors.New("--kube-api-qps and --kube-api-burst must be positive")
	}
	return nil
}
