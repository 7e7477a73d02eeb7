// Package logflags adds the logging flags of the Kubernetes components to a command.
package logflags

import (
	"fmt"
	"os"

	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	"k8s.io/klog/v2"
)

// Add adds --logging-format and -v. They take effect with Apply.
func Add(flags *pflag.FlagSet, config *logsapi.LoggingConfiguration) {
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	logsapi.AddFlags(config, all)
	for _, name := range []string{"logging-format", "v"} {
		flags.AddFlag(all.Lookup(name))
	}
}

// Apply configures logging, and the default logger of slog for the standard library's log messages. Call it once, before
// anything is logged; tests can call it again.
func Apply(config *logsapi.LoggingConfiguration) error {
	logsapi.ReapplyHandling = logsapi.ReapplyHandlingIgnoreUnchanged
	if err := logsapi.ValidateAndApply(config, nil); err != nil {
		return fmt.Errorf("--logging-format, -v: %w", err)
	}
	return nil
}

// PrintError writes to standard error why the program ends: in words, or as a line of JSON where the flags want such logs.
func PrintError(flags *pflag.FlagSet, program string, err error) {
	if flags.Lookup("logging-format").Value.String() != logsapi.JSONLogFormat {
		fmt.Fprintf(os.Stderr, "%s: %v\n", program, err)
		return
	}
	config := logsapi.NewLoggingConfiguration()
	config.Format = logsapi.JSONLogFormat
	_ = Apply(config) // It fails where the flags were applied before, and they stay.
	klog.Background().WithName(program).Error(err, "The program ends")
}
