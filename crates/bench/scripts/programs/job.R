# Vectors, a data frame, matrices and text. Usage: job.R ROWS
rows <- as.integer(commandArgs(trailingOnly = TRUE)[1])
set.seed(5)
orders <- data.frame(customer = sample.int(rows %/% 10L, rows, TRUE), amount = runif(rows), kind = sample(letters, rows, TRUE))
for (round in 1:3) {
    orders$scaled <- (orders$amount - mean(orders$amount)) / sd(orders$amount) + round
    print(head(sort(tapply(orders$scaled, orders$kind, sum)), 3))
    ordered <- orders[order(orders$customer, orders$amount), ]
    print(round(sum(cumsum(ordered$scaled) / seq_len(rows)), 3))
}
matrix <- matrix(rnorm(360000), 600)
print(round(sum(solve(matrix %*% t(matrix) + diag(600))), 6))
words <- paste0("word", orders$customer[seq_len(rows %/% 4L)])
print(length(unique(words)))
