// Package flagenv sets flags from environment variables.
package flagenv

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// Set sets the flags that are not on the command line from environment variables with the flag's name in upper case:
// NODE_NAME for --node-name. Flags of one letter have no variable.
func Set(flags *pflag.FlagSet, lookup func(string) (string, bool)) error {
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
