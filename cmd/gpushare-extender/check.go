package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpushare/gpushare/cmd/internal/program"
	"github.com/gpushare/gpushare/pkg/extender"
	"github.com/gpushare/gpushare/pkg/schedulerconfig"
)

// newCheckCommand returns the command that checks kube-scheduler's configuration.
func newCheckCommand() *cobra.Command {
	o := schedulerconfig.Options{Path: extender.Prefix, Proxy: http.ProxyFromEnvironment, Now: time.Now(), ReadFile: os.ReadFile}
	command := &cobra.Command{
		Use:   "check-scheduler-config FILE",
		Short: "Check kube-scheduler's configuration for settings with which gpushare doesn't work, or doesn't work well",
		Long: `check-scheduler-config reads a KubeSchedulerConfiguration (kubescheduler.config.k8s.io/v1) from FILE, or from standard input
if FILE is -, and prints the settings that are wrong or missing for gpushare: one line for each finding, with its severity,
the field, and what to do. It exits with status 1 if a finding is an error, or if the configuration is invalid.

It checks only what concerns gpushare. kube-scheduler checks the whole file when it starts. Of the files that the configuration names,
the command checks the certificates that are on this machine. It makes no network calls. Set the flags to the extender's values. Run it in
the shell in which you run kubeadm: it warns of a proxy in that shell's environment which kubeadm would give to kube-scheduler.`,
		Args: cobra.ExactArgs(1),
		PreRunE: func(command *cobra.Command, _ []string) error {
			return program.SetFlags(command.Flags(), os.LookupEnv)
		},
		RunE: func(command *cobra.Command, args []string) error {
			return checkSchedulerConfig(command, args[0], o)
		},
	}
	f := command.Flags()
	f.DurationVar(&o.BindTimeout, "bind-timeout", defaultBindTimeout, "value of the extender's --bind-timeout")
	f.DurationVar(&o.GangHold, "gang-hold", defaultGangHold, "value of the extender's --gang-hold")
	f.StringSliceVar(&o.ClientNames, "client-names", []string{defaultClientName}, "value of the extender's --client-names")
	f.IntVar(&o.NodesToScore, "percentage-of-nodes-to-score", chartNodesToScore, "value of the extender's --percentage-of-nodes-to-score; by "+
		"default that of the Helm chart")
	return command
}

// chartNodesToScore is the chart's scheduler.percentageOfNodesToScore.
const chartNodesToScore = 2

// maxConfig is the maximum number of bytes that are read, much more than any configuration has.
const maxConfig = 16 << 20

func checkSchedulerConfig(command *cobra.Command, path string, o schedulerconfig.Options) error {
	if o.BindTimeout < 0 || o.GangHold < 0 || o.BindTimeout > time.Hour || o.GangHold > time.Hour {
		return fmt.Errorf("--bind-timeout and --gang-hold must be between 0 and %v", time.Hour)
	}
	if _, port, err := net.SplitHostPort(command.Root().Flags().Lookup("ui-listen-address").DefValue); err == nil {
		o.PagePort = port
	}
	input, name := command.InOrStdin(), "standard input"
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		input, name = file, path
	}
	data, err := io.ReadAll(io.LimitReader(input, maxConfig))
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	config, err := schedulerconfig.Decode(data)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	out, errors := command.OutOrStdout(), 0
	for _, finding := range schedulerconfig.Check(config, o) {
		fmt.Fprintln(out, finding)
		if finding.Severity == schedulerconfig.Error {
			errors++
		}
	}
	if errors > 0 {
		return fmt.Errorf("%s: %d of the findings must be corrected", name, errors)
	}
	return nil
}
