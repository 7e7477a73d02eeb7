// Package logflags adds the logging flags of the Kubernetes components to a command.
package logflags

import (
	"fmt"

	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
)

// Add adds --logging-format and -v. They take effect with Apply.
func Add(flags *pflag.FlagSet, config *logsapi.LoggingConfiguration) {
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	logsapi.AddFlags(config, all)
	for _, name := range []string{"logging-format", "v"} {
		flags.AddFlag(all.Lookup(name))
	}
}

// Apply configures logging. Call it once, before anything is logged; tests can call it again.
func Apply(config *logsapi.LoggingConfiguration) error {
	logsapi.ReapplyHandling = logsapi.ReapplyHandlingIgnoreUnchanged
	if err := logsapi.ValidateAndApply(config, nil); err != nil {
		return fmt.Errorf("--logging-format, -v: %w", err)
	}
	return nil
}
