// Package logflags gives a command the flags of Kubernetes' components that say what is logged, and in which format.
package logflags

import (
	"fmt"

	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
)

// Add adds --logging-format and -v. The configuration counts once it is applied.
func Add(flags *pflag.FlagSet, config *logsapi.LoggingConfiguration) {
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	logsapi.AddFlags(config, all)
	for _, name := range []string{"logging-format", "v"} {
		flags.AddFlag(all.Lookup(name))
	}
}

// Apply has the process log as the flags say. It is called once, before anything is logged; a test may call it again.
func Apply(config *logsapi.LoggingConfiguration) error {
	logsapi.ReapplyHandling = logsapi.ReapplyHandlingIgnoreUnchanged
	if err := logsapi.ValidateAndApply(config, nil); err != nil {
		return fmt.Errorf("--logging-format, -v: %w", err)
	}
	return nil
}
