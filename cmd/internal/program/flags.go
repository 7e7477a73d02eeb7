package program

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// SetFlags sets the flags that are not on the command line from environment variables with the flag's name in upper case:
// NODE_NAME for --node-name. Flags of one letter have no variable.
func SetFlags(flags *pflag.FlagSet, lookup func(string) (string, bool)) error {
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) {
		name := strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if value, ok := lookup(name); ok && !f.Changed && len(name) > 1 && f.Name != "help" && f.Name != "version" {
			if err := flags.Set(f.Name, value); err != nil {
				errs = append(errs, fmt.Errorf("environment variable %s: %w", name, err))
			}
		}
	})
	return errors.Join(errs...)
}

// addLoggingFlags adds those of the Kubernetes components' logging flags that the programs have: --logging-format and -v.
func addLoggingFlags(flags *pflag.FlagSet, config *logsapi.LoggingConfiguration) {
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	logsapi.AddFlags(config, all)
	for _, name := range []string{"logging-format", "v"} {
		flags.AddFlag(all.Lookup(name))
	}
}

// applyLogging configures logging, and the default logger of slog for the standard library's log messages. Call it once,
// before anything is logged; tests can call it again.
func applyLogging(config *logsapi.LoggingConfiguration) error {
	logsapi.ReapplyHandling = logsapi.ReapplyHandlingIgnoreUnchanged
	if err := logsapi.ValidateAndApply(config, nil); err != nil {
		return fmt.Errorf("--logging-format, -v: %w", err)
	}
	return nil
}
